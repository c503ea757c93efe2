// Creates elements. Text becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element with properties (or `aria-` attributes) and children, or lists of them; null is skipped. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  for (const child of children.flat()) if (child != null) element.append(child);
  return element;
}

/** Create an icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** Create a button that shows only an icon. */
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", className: "icon", title: label, "aria-label": label, onclick }, icon(name));
}

/** Copy text, and show on the button that it was copied. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages from other machines without TLS have no clipboard interface.
    const area = el("textarea", { value: text, className: "hide" });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.querySelector("use").setAttribute("href", "#i-done");
  document.querySelector("#said").textContent = "Copied";
  setTimeout(() => button.querySelector("use").setAttribute("href", "#i-copy"), 1500);
}
