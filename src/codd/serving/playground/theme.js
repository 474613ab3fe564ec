// Not a module: it runs before the first paint, so that a dark room stays dark.
(() => {
  const kept = localStorage.getItem("codd.theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
