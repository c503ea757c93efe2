// Applies the chosen theme before the first paint. Without a choice, the system's theme applies.
try {
  const theme = localStorage.getItem("moepack.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // The browser blocks storage.
}
