// Refresh of a page: it is requested again, and what has changed in it is replaced. Without scripts, reload it.
"use strict";
const every = 2000, soon = 100, found = (id) => document.getElementById(id);
let tag = "", timer = 0;

function regions(page) {
  return [...page.querySelectorAll("header, main > section[id], [data-live]")].map((part) => [part.id || part.localName, part]);
}

function focused(part) {
  const at = document.activeElement;
  if (!part.contains(at)) return () => {};
  const same = (each) => each.localName === at.localName && each.id === at.id && each.value === at.value && each.href === at.href;
  return (fresh) => [...fresh.querySelectorAll(at.localName)].find(same)?.focus({ preventScroll: true });
}

function replaceRows(old, fresh) {  // keeps rows that are the same, and ticks
  const known = new Map([...old.rows].map((row) => [row.dataset.key, row]));
  old.replaceChildren(...[...fresh.rows].map((row) => {
    const before = known.get(row.dataset.key);
    if (before?.innerHTML === row.innerHTML) return before;
    const tick = row.querySelector("input"), ticked = before?.querySelector("input");
    if (tick && ticked) tick.checked = ticked.checked;
    return row;
  }));
}

async function refresh() {
  clearTimeout(timer);
  const start = performance.now();
  let wait = every;
  try {
    if (!document.hidden) {
      const answer = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 401) return location.reload();
      found("state").textContent = answer.ok || answer.status === 304 ? "" : "This page is gone.";
      if (answer.ok) {
        tag = answer.headers.get("ETag");
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"), here = new Map(regions(document));
        for (const [id, part] of regions(fresh)) {
          const old = here.get(id);
          if (!old) { document.querySelector("main").append(part); continue; }
          if (old.innerHTML === part.innerHTML) continue;
          const focus = focused(old);
          part.localName === "tbody" ? replaceRows(old, part) : old.replaceChildren(...part.childNodes);
          focus(old);
        }
        if (Number(fresh.getElementById("rows")?.dataset.unread)) wait = soon;
        count();
      }
    }
  } catch {
    found("state").textContent = "No answer; still trying.";
  }
  timer = setTimeout(refresh, wait === soon ? soon : Math.max(wait, 10 * (performance.now() - start)));  // a tenth of a server's time
}

function count() {
  const button = found("compare"), ticked = document.querySelectorAll("#rows input:checked").length;
  if (button) button.textContent = ticked ? `Compare ${ticked} run${ticked > 1 ? "s" : ""}` : "Compare ticked runs";
}

document.addEventListener("change", count);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input")) return;
  event.preventDefault();
  (found("q") ?? found("content")).focus();
});
found("q")?.addEventListener("input", (event) => {
  const address = new URL(location.href);
  address.searchParams.set("q", event.target.value);
  history.replaceState(null, "", address);
  clearTimeout(timer);
  timer = setTimeout(refresh, soon);
});
count();
if (!found("token")) timer = setTimeout(refresh, Number(found("rows")?.dataset.unread) ? soon : every);
