// Speaks with the server. Addresses are relative, so the page works behind a proxy that serves it from a folder.

/** A request that failed: what to tell the user, and the HTTP status (0 without an answer). */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(path, key, signal, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("The server cannot be reached.");
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new Failure(content?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

/** Return the names of the models, the context in tokens, and whether the model has a chat template. */
export async function describe(key) {
  const [models, props] = await Promise.all(
    ["v1/models", "props"].map(async (path) => (await send(path, key)).json()),
  );
  return {
    models: models.data.map((model) => model.id),
    context: props.default_generation_settings.n_ctx,
    chats: Boolean(props.chat_template),
  };
}

/** Yield the events of a streamed answer. */
export async function* stream(path, key, signal, body) {
  const response = await send(path, key, signal, { ...body, stream: true, stream_options: { include_usage: true } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Failure(event.error.message);
        yield event;
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof Failure) throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Failure("The connection ended before the answer did.");
}
