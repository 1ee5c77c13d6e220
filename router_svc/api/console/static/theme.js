// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's theme holds.
(() => {
  const key = "pdserve-theme";
  const stored = () => {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // Storage may be forbidden; then the choice lasts as long as the page.
    }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = (theme) => {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  };
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  apply(stored());
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(isDark()));
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      apply(theme);
      try {
        localStorage.setItem(key, theme);
      } catch {
        // See above.
      }
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();
