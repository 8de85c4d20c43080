// Keyboard shortcuts, the note of the token under the pointer, the table's form, light and dark mode. Loaded once.
(() => {
  const $ = (query) => document.querySelector(query);
  const follow = (query) => $(query)?.click();
  const root = document.documentElement;
  const dark = () => getComputedStyle(root).colorScheme === "dark" || (!root.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
  const scheme = (value) => { root.style.colorScheme = value; };
  const toggle = () => { const value = dark() ? "light" : "dark"; scheme(value); localStorage.setItem("scheme", value); };
  scheme(localStorage.getItem("scheme") || "");

  const note = (token) => {
    document.querySelectorAll(".tokens .at").forEach((other) => other.classList.remove("at"));
    token?.classList.add("at");
    const bar = $("#note");
    bar.hidden = !token;
    bar.textContent = token ? `${JSON.stringify(token.textContent)} · ${token.dataset.note}` : "";
  };
  document.addEventListener("mouseover", (event) => { const token = event.target.closest?.(".tokens span"); if (token) note(token); });
  document.addEventListener("focusin", (event) => { if (event.target.matches(".tokens") && !event.target.querySelector(".at")) note(event.target.firstElementChild); });

  const send = (form) => {
    const given = [...new FormData(form)].filter(([, value]) => value !== "");
    const query = new URLSearchParams(given).toString();
    emitEvent("sub_pages_navigate", form.dataset.path + (query ? "?" + query : ""));
  };
  document.addEventListener("submit", (event) => { if (event.target.matches(".filters")) { event.preventDefault(); document.activeElement.blur(); send(event.target); } });
  document.addEventListener("change", (event) => { if (event.target.matches(".filters select")) send(event.target.form); });

  // A table that is renewed keeps the row that had the focus.
  let row = null;
  document.addEventListener("focusin", (event) => { row = event.target.closest?.("a.row")?.dataset.id ?? null; });
  const rows = () => [...document.querySelectorAll("a.row")];
  new MutationObserver(() => {
    if (document.activeElement === document.body && row) rows().find((link) => link.dataset.id === row)?.focus({ preventScroll: true });
    if (!$(".tokens")) { const bar = $("#note"); if (bar) bar.hidden = true; }
  }).observe(document, { childList: true, subtree: true });
  const move = (by) => {
    const all = rows();
    if (!all.length) return follow(by > 0 ? "a[rel=next]" : "a[rel=prev]");
    const at = all.indexOf(document.activeElement);
    all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + by))].focus();
  };
  const step = (by) => {
    const at = document.activeElement.querySelector(".at") ?? document.activeElement.firstElementChild;
    const next = by > 0 ? at.nextElementSibling : at.previousElementSibling;
    if (next) { note(next); next.scrollIntoView({ block: "nearest" }); }
  };
  const fold = () => {
    const all = [...document.querySelectorAll("details")];
    const open = all.some((one) => !one.open);
    all.forEach((one) => { one.open = open; });
  };
  const keys = {
    j: () => move(1), k: () => move(-1), s: () => follow("a.side"), o: fold, d: toggle, Escape: () => follow("a.up"),
    c: () => follow('header a[href="/curves"]'), t: () => follow('header a[href="/"]'),
    "/": () => $(".filters [name=search]")?.focus(), "?": () => $("#help").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (typing && event.key === "Escape") return event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
    if (event.target.matches(".tokens") && ["ArrowLeft", "ArrowRight"].includes(event.key)) { event.preventDefault(); return step(event.key === "ArrowRight" ? 1 : -1); }
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("#dark")) toggle();
    if (event.target.closest("#help-button")) $("#help").showModal();
  });
})();
