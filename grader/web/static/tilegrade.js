// Tilegrade's only script. Every page works without it; it adds local times, live status, dropping files and drafts.
"use strict";

(() => {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

  // "30 Nov 2026, 09:28 UTC" becomes the reader's own time; the UTC text stays as the tooltip
  function localTimes(root) {
    for (const time of root.querySelectorAll("time[data-local]")) {
      const moment = new Date(time.dateTime);
      if (Number.isNaN(moment.getTime())) continue;
      time.title = time.textContent;
      time.textContent = format.format(moment);
      time.removeAttribute("data-local");
    }
  }

  // a second click while the first is on its way would only be answered with the same page
  function oneClick() {
    document.addEventListener("submit", (event) => {
      if (event.defaultPrevented) return;
      const button = event.submitter;
      if (button) setTimeout(() => { button.disabled = true; });
    });
    // coming back with the browser's own button shows the page as it was left
    addEventListener("pageshow", () => {
      for (const button of document.querySelectorAll("button[disabled]")) button.disabled = false;
    });
  }

  // charts that were not drawn yet when the page was made: the page is asked for again until it has them
  async function fetchCharts() {
    const address = location.href;
    for (let wait_ms = 400; wait_ms < 20000 && document.querySelector("[data-undrawn]"); wait_ms *= 2) {
      await new Promise((resolve) => { setTimeout(resolve, wait_ms); });
      const answer = await fetch(address, { credentials: "same-origin" });
      if (!answer.ok || answer.redirected) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (address !== location.href) return; // the lesson's sliders moved: these are another page's charts
      for (const waiting of document.querySelectorAll("[data-undrawn]")) {
        const figure = waiting.closest("figure");
        const drawn = page.getElementById(figure.id);
        if (drawn && !drawn.querySelector("[data-undrawn]")) figure.replaceWith(drawn);
      }
    }
  }

  function follow(panel) {
    const line = panel.querySelector("[data-live-line]");
    const steps = panel.querySelector("[data-live-steps]");
    const report = document.getElementById("report");
    const { events, status, fragment, facts } = panel.dataset;
    let { stamp } = panel.dataset;
    let over = false;

    async function put(address, target) {
      const answer = await fetch(address, { credentials: "same-origin" });
      if (!answer.ok) { location.reload(); return false; }
      target.innerHTML = await answer.text();
      localTimes(target);
      return true;
    }

    async function show(news) {
      if (over) return;
      // a screen reader speaks what changes in this line, so it is left alone when nothing did
      if (line.textContent !== news.line) line.textContent = news.line;
      if (steps.innerHTML !== news.steps) steps.innerHTML = news.steps;
      // staff also read how it was handled, and may act on it
      if (facts && stamp !== news.stamp) {
        stamp = news.stamp;
        if (!await put(facts, document.getElementById("facts-now"))) return;
      }
      if (!news.done) return;
      if (!await put(fragment, report)) return;
      over = true;
      for (const part of document.querySelectorAll("[data-under-way]")) part.remove();
      fetchCharts().catch(() => {});
      document.title = document.title.replace(/^(#\d+) [^·]*·/, `$1 ${news.headline} ·`);
    }

    async function poll() {
      if (over) return;
      try {
        const answer = await fetch(status, { credentials: "same-origin" });
        if (answer.status === 401 || answer.status === 404) { location.reload(); return; }
        if (answer.ok) await show(await answer.json());
      } catch {
        line.textContent = "The server cannot be reached just now. Trying again…";
      }
      if (!over) setTimeout(poll, document.hidden ? 10000 : 2000);
    }

    if (!("EventSource" in window)) { poll(); return; }
    const source = new EventSource(events);
    source.addEventListener("status", (event) => {
      const news = JSON.parse(event.data);
      if (news.done) source.close();
      show(news).catch(poll); // the report could not be fetched; asking again ends in it
    });
    source.addEventListener("error", () => {
      // CLOSED: the server has no stream to spare, or the session ended; asking works or explains itself
      if (source.readyState === EventSource.CLOSED && !over) poll();
    });
    addEventListener("pagehide", () => source.close());
  }

  const size = (bytes) => bytes < 1024 ? `${bytes} B` : `${(bytes / 1024).toFixed(1)} KiB`;

  // a file dropped anywhere on the page becomes the form's file; without this the browser would open it and leave
  function dropFiles(form) {
    const input = form.querySelector("input[type=file]");
    const said = form.querySelector("[data-drop-said]");
    const hasFiles = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
    let depth = 0;
    const show = () => form.classList.toggle("dragging", depth > 0);
    form.querySelector("[data-drop-hint]").hidden = false;
    document.addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth += 1; show(); } });
    document.addEventListener("dragleave", (event) => { if (hasFiles(event)) { depth = Math.max(0, depth - 1); show(); } });
    document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      depth = 0;
      show();
      if (event.dataTransfer.files.length !== 1) { said.textContent = "One file at a time, please."; return; }
      input.files = event.dataTransfer.files;
      input.dispatchEvent(new Event("change"));
      form.scrollIntoView({ block: "nearest" });
      form.querySelector("button.main").focus();
    });
    input.addEventListener("change", () => {
      const [file] = input.files;
      said.textContent = file ? `${file.name}, ${size(file.size)}, will be handed in.` : "";
    });
  }

  // pasted text outlives a reload; it is forgotten once the file was taken
  function keepDraft(form) {
    const area = form.querySelector("textarea");
    const key = `draft-${form.dataset.draft}`;
    sessionStorage.removeItem("sent");
    const draft = sessionStorage.getItem(key);
    if (!area.value && draft) {
      area.value = draft;
      area.closest("details").open = true;
    }
    area.addEventListener("input", () => {
      if (area.value) sessionStorage.setItem(key, area.value);
      else sessionStorage.removeItem(key);
    });
    form.addEventListener("submit", () => sessionStorage.setItem("sent", key));
  }

  function forgetSentDraft() {
    const key = sessionStorage.getItem("sent");
    if (key && document.querySelector("[data-handed-in]")) sessionStorage.removeItem(key);
  }

  localTimes(document);
  oneClick();
  for (const form of document.querySelectorAll("form[data-drop]")) dropFiles(form);
  for (const form of document.querySelectorAll("form[data-draft]")) keepDraft(form);
  forgetSentDraft();
  fetchCharts().catch(() => {});
  document.addEventListener("tilegrade:undrawn", () => { fetchCharts().catch(() => {}); });
  const panel = document.querySelector("[data-events]");
  if (panel) follow(panel);
})();
