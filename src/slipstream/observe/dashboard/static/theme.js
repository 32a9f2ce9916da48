// Before the first paint: the theme that was chosen, or else the system's.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("slipstream-theme");
    } catch {
      return null; // storage is switched off
    }
  };
  const apply = () => {
    const theme = stored() ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  window.setTheme = (theme) => {
    try {
      localStorage.setItem("slipstream-theme", theme);
    } catch {
      document.documentElement.dataset.theme = theme;
    }
    apply();
  };
  apply();
})();
