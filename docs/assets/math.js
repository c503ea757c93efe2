// Sets the equations of a page with KaTeX. The extension arithmatex marks them and keeps their delimiters, two characters each.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const marked = element.textContent.trim();
    katex.render(marked.slice(2, -2), element, { displayMode: marked.startsWith("\\["), throwOnError: false });
  }
});
