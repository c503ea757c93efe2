"""The page at `/`: its headers and size over HTTP, and a whole conversation in headless Chromium."""

import http.client
import json
import re
import time
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from browser_support import BROWSER
from moepack.integrations.loading import open_model, open_tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from moepack.serving.engine import Engine
from moepack.serving.http import page as room
from moepack.serving.http.server import Settings, create_app
from serving_support import is_idle, running, templated

KEY = "a secret"
CONTEXT = 600
QUESTION = "The sea"
CHATS = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def source(packed, tmp_path_factory):
    return templated(packed, tmp_path_factory.mktemp("page") / "model")


@pytest.fixture(scope="module")
def engine(source):
    return Engine(open_model(source, "float32"), open_tokenizer(source), slots=4, context=CONTEXT)


@pytest.fixture(scope="module")
def port(engine):
    with running(create_app(engine, Settings("tiny", answer=12))) as port:
        yield port


@pytest.fixture
def slow(engine, monkeypatch):
    """Let answers take 20 ms a token, and end only at their length."""
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda: (time.sleep(0.02), step()))
    monkeypatch.setattr(engine, "ends", frozenset())


@pytest.fixture(scope="module")
def locked(source):
    """The port of a server with a key, whose model has no chat template."""
    tokenizer = open_tokenizer(source)
    tokenizer.chat_template = None
    engine = Engine(open_model(source, "float32"), tokenizer, slots=4, context=CONTEXT)
    with running(create_app(engine, Settings("tiny", api_key=KEY, answer=8, hosts=("127.0.0.1",)))) as port:
        yield port


def fetch(port, path, method="GET", **headers):
    """A request; its status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers, content


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found, self.inline = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_the_page_is_small_and_every_file_is_served():
    sizes = {file.name: len(file.read_bytes()) for file in files(room).iterdir() if not file.name.startswith("__")}
    assert sum(sizes.values()) <= room.LARGEST
    assert {f"/page/{name}" for name in sizes if name != "index.html"} | {"/"} == set(room.PATHS)


def test_nothing_is_inline_and_nothing_is_from_elsewhere():
    for file in files(room).iterdir():
        if file.suffix in (".html", ".css", ".js"):
            content = file.read_text()
            assert not re.findall(r"(?:src|href|url\(|import|fetch\()\s*=?\s*['\"(]*(?:https?:)?//", content)
            assert not re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", content
            )
    elements = Elements(files(room).joinpath("index.html").read_text())
    assert elements.inline == ""
    for tag, attributes in elements.found:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag


def test_headers_forbid_what_the_page_does_not_need(locked):
    """The page is open without the key; what it asks for is not."""
    for path in room.PATHS:
        status, headers, content = fetch(locked, path)
        assert status == 200 and content and KEY.encode() not in content
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert fetch(locked, "/props")[0] == fetch(locked, "/v1/models")[0] == 401
    assert fetch(locked, "/", Host="other.example")[0] == 400
    assert fetch(locked, "/page/../server.py")[0] == fetch(locked, "/page/none.js")[0] == 401


def test_browsers_keep_the_files_until_they_change(port):
    for path in room.PATHS:
        _, headers, content = fetch(port, path)
        assert headers["Cache-Control"] == "no-cache"
        for known in (headers["ETag"], f'"other", W/{headers["ETag"]}'):
            status, again, nothing = fetch(port, path, If_None_Match=known)
            assert (status, again["ETag"], nothing) == (304, headers["ETag"], b"")
            assert again["Content-Security-Policy"] == headers["Content-Security-Policy"]
        assert fetch(port, path, If_None_Match='"other"')[2] == content
        status, head, nothing = fetch(port, path, method="HEAD")
        assert (status, head["Content-Length"], nothing) == (200, str(len(content)), b"")


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """A function that opens the page. At the end, no page may have reported an error or asked anybody else."""
    complaints, contexts = [], []

    def opened(port, width=1200, height=800, before=lambda page: None, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        origin = f"http://127.0.0.1:{port}/"
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if is_complaint(message) else None)
        context.on("request", lambda request: request.url.startswith(origin) or complaints.append(request.url))
        before(page)
        page.goto(origin)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def is_complaint(message):
    """Whether a message of the console is more than the report of a failed request, which some tests provoke."""
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


def say(page, text):
    """Send a message, and wait for the end of the answer."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    ends(page)


def ends(page):
    page.wait_for_selector("article.assistant:last-child:not(.running) .actions")


def shown(page, selector="article.assistant:last-child"):
    """The text of the last answer, without its statistics."""
    return page.text_content(f"{selector} > .markdown")


def asked(port, messages, **fields):
    """The server's answer to a chat without the page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "messages": messages, **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    content = json.load(connection.getresponse())
    connection.close()
    return content["choices"][0]["message"]["content"]


def settings(page, **fields):
    page.click("#drawer-open")
    for name, value in fields.items():
        page.fill(f"#drawer [name={name}]", value)
    page.keyboard.press("Escape")


def events(*deltas):
    """The stream of an answer."""
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": len(deltas)}}
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (*chunks, usage)) + "data: [DONE]\n\n"


def script(page, *deltas):
    """Let the model write what a test wants."""
    page.unroute_all()
    page.route(CHATS, lambda route: route.fulfill(content_type="text/event-stream", body=events(*deltas)))


def test_a_whole_conversation(visit, port):
    page = visit(port)
    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    page.wait_for_selector("#ideas button")
    assert page.title() == "tiny - moepack"
    settings(page, system="be kind", temperature="0", max_tokens="9", stop="never\nnot")
    say(page, QUESTION)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": QUESTION}]
    first = asked(port, messages, temperature=0, max_tokens=9)
    assert sent[0]["messages"] == messages
    assert (sent[0]["temperature"], sent[0]["max_tokens"], sent[0]["stop"]) == (0, 9, ["never", "not"])
    assert "top_p" not in sent[0]
    say(page, "And then?")
    answer = {"role": "assistant", "content": first}
    assert sent[1]["messages"] == [*messages, answer, {"role": "user", "content": "And then?"}]
    assert re.search(r"9 tokens · [\d.]+ tokens/s · first after", page.text_content("article:last-child .stats"))
    assert re.fullmatch(r"\d+ / 600", page.text_content("#context span"))

    page.hover("article.user")
    page.click("article.user [title=Edit]")
    page.fill(".editor textarea", "The land")
    page.click(".editor .primary")
    ends(page)
    assert sent[2]["messages"] == [messages[0], {"role": "user", "content": "The land"}]
    assert page.locator("article").count() == 2
    page.click("article:last-child [title='Ask again']")
    ends(page)
    assert sent[3] == sent[2]


def test_a_message_before_the_server_has_answered_waits_for_it(visit, port):
    held = []
    page = visit(port, before=lambda page: page.route("**/props", lambda route: held.append(route)))
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.press("#text", "Enter")
    assert page.input_value("#text") == QUESTION and not page.locator("article").count()
    while not held:
        page.wait_for_timeout(10)
    held.pop().continue_()
    ends(page)
    assert page.input_value("#text") == "" and shown(page)
    assert page.locator("article").count() == 2


def test_a_message_is_kept_while_the_server_cannot_be_reached(visit, port):
    page = visit(port, before=lambda page: page.route("**/props", lambda route: route.abort()))
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.wait_for_selector("#notice:has-text('The server cannot be reached.')")
    assert page.input_value("#text") == QUESTION and not page.locator("article").count()
    page.unroute_all()
    page.click("#notice button")
    page.press("#text", "Enter")
    ends(page)
    assert shown(page)


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_a_stop_keeps_the_text_and_frees_the_slot(visit, port, engine, slow, way):
    page = visit(port)
    settings(page, max_tokens="550", temperature="0")
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.wait_for_selector("article.running .stats:has-text('tokens')")
    page.keyboard.press("Escape") if way == "Escape" else page.click("#send[aria-label=Stop]")
    ends(page)
    assert "stopped" in page.text_content("article:last-child .stats")
    assert shown(page) and is_idle(engine)
    page.wait_for_selector("#send[aria-label=Send]")


def test_a_reload_keeps_the_conversations(visit, port):
    page = visit(port)
    settings(page, system="be kind", temperature="0.5")
    say(page, QUESTION)
    first = shown(page)
    page.keyboard.press("Alt+n")
    page.wait_for_selector("#empty:visible")
    say(page, "Another")
    assert page.locator("#chats .open").all_text_contents() == ["Another", QUESTION]
    page.reload()
    page.wait_for_selector("#chats .open[aria-current]:has-text('Another')")
    page.click("#chats .open:has-text('The sea')")
    assert shown(page) == first
    page.click("#drawer-open")
    assert page.input_value("#drawer [name=system]") == "be kind"
    assert page.input_value("#drawer [name=temperature]") == "0.5"
    page.keyboard.press("Escape")
    page.on("dialog", lambda dialog: dialog.accept())
    page.hover("#chats li:has-text('Another')")
    page.click("#chats li:has-text('Another') [title^=Delete]")
    assert page.locator("#chats .open").all_text_contents() == [QUESTION]
    page.reload()
    assert page.locator("#chats .open").all_text_contents() == [QUESTION]
    assert shown(page) == first


def test_a_reload_in_the_middle_keeps_what_was_written(visit, port, engine, slow):
    page = visit(port)
    settings(page, max_tokens="550", temperature="0")
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.wait_for_selector("article.running .stats:has-text('tokens/s')")
    page.reload()
    ends(page)
    assert "interrupted" in page.text_content("article:last-child .stats")
    assert shown(page) and is_idle(engine)


def test_errors_are_shown_and_can_be_retried(visit, port):
    page = visit(port)
    say(page, "x" * CONTEXT)
    assert "the context is 600 tokens" in page.text_content("article:last-child .error")
    page.route(CHATS, lambda route: route.abort())
    page.keyboard.press("Alt+n")
    say(page, QUESTION)
    assert page.text_content("article:last-child .error") == "The server cannot be reached."
    broken = events({"content": "half"}).replace("data: [DONE]", "")
    page.unroute_all()
    page.route(CHATS, lambda route: route.fulfill(content_type="text/event-stream", body=broken))
    page.click("[title='Ask again']")
    page.wait_for_selector(".error:has-text('The connection ended before the answer did.')")
    assert shown(page) == "half"
    failure = 'data: {"error": {"message": "the model failed"}}\n\n'
    page.unroute_all()
    page.route(CHATS, lambda route: route.fulfill(content_type="text/event-stream", body=failure))
    page.click("[title='Ask again']")
    page.wait_for_selector(".error:has-text('the model failed')")
    page.unroute_all()
    page.click("[title='Ask again']")
    page.wait_for_selector(".error", state="detached")
    ends(page)
    assert shown(page)


def test_the_key_is_asked_for_and_a_model_without_template_continues(visit, locked):
    page = visit(locked)
    page.click("#notice button")
    page.fill("#drawer [name=key]", "wrong")
    page.keyboard.press("Escape")
    page.wait_for_selector("#notice:has-text('The API key is wrong.')")
    settings(page, key=KEY, temperature="0")
    page.wait_for_selector("#empty:has-text('it continues your text')")
    assert page.is_hidden("#notice")
    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    say(page, QUESTION)
    say(page, " is")
    assert sent[0]["prompt"] == QUESTION and re.fullmatch(r"The sea.+ is", sent[1]["prompt"], re.DOTALL)


HOSTILE = """\
<img src=x onerror=alert(1)> <script>alert(1)</script>

[a](javascript:alert(1)) [b](data:text/html,x) ![c](https://elsewhere.example/c.png) <javascript:alert(1)>
[d](https://elsewhere.example/"onmouseover="alert(1)) https://elsewhere.example/e). **bold** *slant* `co*d*e`

| one | two |
|---|--:|
| `1` | 2 \\| 3 |

1. first
   - inner
2. second

> said

```python
print("<b>")
"""


def test_what_a_model_writes_is_text(visit, port):
    page = visit(port, permissions=["clipboard-read", "clipboard-write"])
    script(page, {"reasoning_content": "Let me see."}, *({"content": part} for part in re.split("(?= )", HOSTILE)))
    say(page, QUESTION)
    answer = page.locator("article:last-child > .markdown")
    assert answer.locator("img, script, iframe, style").count() == 0
    assert "<img src=x onerror=alert(1)> <script>" in answer.text_content()
    links = answer.locator("a")
    found = [links.nth(i).get_attribute("href") for i in range(links.count())]
    assert len(found) == 3 and all(link.startswith("https://elsewhere.example/") for link in found), found
    assert answer.locator("strong, em, p > code").all_text_contents() == ["bold", "slant", "co*d*e"]
    assert answer.locator("td").all_text_contents() == ["1", "2 | 3"]
    assert answer.locator("ol > li > ul > li").all_text_contents() == ["inner"]
    assert answer.locator("blockquote").text_content() == "said"
    answer.locator("[title='Copy the code']").click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == 'print("<b>")'
    assert not page.is_visible("details.reasoning .markdown")
    page.click("details.reasoning summary")
    assert page.text_content("details.reasoning .markdown") == "Let me see."


def test_thoughts_in_tags_are_folded(visit, port):
    page = visit(port)
    for deltas in (["<thi", "nk>Why", "?</think>", "So."], ["Why?", "</think>", "\n\nSo."]):
        script(page, *({"content": delta} for delta in deltas))
        say(page, QUESTION)
        assert page.text_content("article:last-child .reasoning .markdown") == "Why?"
        assert shown(page) == "So."


def test_no_text_makes_the_page_hang(visit, port):
    page = visit(port)
    page.set_default_timeout(60_000)
    pieces = ("*", "**a ", "_", "`", "``a`", "[", "[a](", "![", "> ", "- ", "| ", "~~", "<", "http://", "\\", "*a_")
    contents = [(piece + end) * 3000 for piece in pieces for end in ("", "\n")]
    for content in contents:
        script(page, {"content": content})
        page.keyboard.press("Alt+n")
        say(page, QUESTION)
        assert page.locator("article:last-child > .markdown > *").count() > 0


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(visit, port, width, scheme):
    page = visit(port, width, 700, has_touch=True, is_mobile=True, color_scheme=scheme)
    script(page, {"content": f"{'long' * 200}\n\n```\n{'code' * 200}\n```\n\n|{'a|' * 40}\n|{'-|' * 40}\n"})
    say(page, "word" * 100)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('#scroll').scrollWidth") <= width
    for selector in ("#send", "#drawer-open", "#side-open"):
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 700
    assert not page.is_visible("#new")
    page.click("#side-open")
    page.click("#new")
    page.wait_for_selector("#empty:visible")
    page.wait_for_selector("#new", state="hidden")


def test_the_theme_is_kept(visit, port):
    page = visit(port, color_scheme="light")
    colour = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = colour()
    page.click("#theme")
    assert colour() == light
    page.click("#theme")
    dark = colour()
    assert dark != light
    page.reload()
    assert colour() == dark
