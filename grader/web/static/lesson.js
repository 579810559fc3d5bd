// The lesson's sliders, live. Without this script the form's button asks for the same page.
"use strict";

(() => {
  const form = document.querySelector("[data-lesson]");
  const parts = document.querySelectorAll("[data-part]");
  const QUIET_MS = 120; // a slider that is being dragged speaks sixty times a second
  let waiting = 0;
  let asked = 0;

  async function show() {
    const address = `${form.action}?${new URLSearchParams(new FormData(form))}`;
    const number = ++asked;
    const answer = await fetch(address, { credentials: "same-origin" });
    if (number !== asked) return; // a later one is on its way
    if (!answer.ok || answer.redirected) { location.href = address; return; }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of parts) {
      const open = part.querySelector("details")?.open;
      part.replaceChildren(...page.getElementById(part.id).childNodes);
      if (open) part.querySelector("details").open = true;
    }
    history.replaceState(null, "", address);
    document.dispatchEvent(new Event("tilegrade:undrawn")); // the page's own script sees to charts that are late
  }

  form.addEventListener("input", (event) => {
    const shown = event.target.labels?.[0]?.querySelector("output");
    const value = Number(event.target.value);
    if (shown) shown.textContent = ("power" in event.target.dataset ? 2 ** value : value).toLocaleString("en");
    clearTimeout(waiting);
    waiting = setTimeout(() => { show().catch(() => {}); }, QUIET_MS);
  });
  // the button is for pages without a script; Enter on a slider still works
  form.querySelector("[data-show]").hidden = true;
})();
