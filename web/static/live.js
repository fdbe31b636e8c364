// Keeps the part of the page that is marked `data-live` as the server says, asks in a dialog what
// would otherwise be asked on a page of its own, and shows how far an upload is. Without this file
// everything works, too.
"use strict";

const note = document.getElementById("note");
const live = document.querySelector("[data-live]");

function say(text) {
  note.textContent = text;
  note.hidden = !text;
}

// Changes only what differs, so that focus, selection, opened details and drawn charts stay.
function become(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName) {
    old.replaceWith(wanted.cloneNode(true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!wanted.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) {
      old.removeAttribute(name);
    }
  }
  for (const { name, value } of wanted.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  becomeChildren(old, wanted);
}

// Rows and the like have ids; one that was added or removed above must not change all below.
function becomeChildren(old, wanted) {
  const known = new Map([...old.children].filter((each) => each.id).map((each) => [each.id, each]));
  let place = old.firstChild;
  for (const child of [...wanted.childNodes]) {
    const same = child.id && known.get(child.id);
    if (same && same !== place) {
      old.insertBefore(same, place);
      place = same;
    } else if (!place || (!same && (child.id || place.id))) {
      old.insertBefore(child.cloneNode(true), place);
      continue;
    }
    const next = place.nextSibling;
    become(place, child);
    place = next;
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function listen() {
  const events = new EventSource(location.href);
  events.addEventListener("page", (event) => {
    const drawn = document.createElement("template");
    drawn.innerHTML = event.data;
    becomeChildren(live, drawn.content);
    const { title } = live.querySelector("[data-title]")?.dataset ?? {};
    if (title) document.title = `${title} · embedfarm`;
    say("");
  });
  events.addEventListener("note", (event) => say(event.data));
  events.addEventListener("error", () => {
    say("Not connected; what you see is from before.");
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  });
  events.addEventListener("open", () => say(""));
}

async function ask(event) {
  const link = event.target.closest("a[data-ask]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const answer = await fetch(link.href, { headers: { accept: "text/html" } });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const question = page.querySelector("[data-question]");
  if (!question) {
    location.assign(link.href);
    return;
  }
  const dialog = document.getElementById("ask");
  dialog.replaceChildren(question);
  dialog.querySelector("[data-leave]").addEventListener("click", (click) => {
    click.preventDefault();
    dialog.close();
    link.focus();
  });
  dialog.showModal();
}

// Sends a form with a file, and shows how much of it has gone.
function upload(event) {
  const form = event.target;
  event.preventDefault();
  const sent = form.querySelector("progress");
  const button = form.querySelector("button");
  const request = new XMLHttpRequest();
  const rest = (going) => {
    sent.hidden = !going;
    button.disabled = going;
  };
  request.upload.addEventListener("progress", ({ loaded, total }) => {
    sent.value = loaded / total;
    say(`${Math.floor((100 * loaded) / total)} % of the file is sent.`);
  });
  request.addEventListener("error", () => {
    rest(false);
    say("The upload broke off; what was sent is forgotten.");
  });
  request.addEventListener("load", () => {
    if (request.status < 400) {
      location.assign(request.responseURL);
      return;
    }
    rest(false);
    const page = new DOMParser().parseFromString(request.responseText, "text/html");
    say(page.querySelector("[data-reason]")?.textContent ?? `Refused: ${request.statusText}`);
  });
  request.open("POST", form.action);
  request.setRequestHeader("accept", "text/html");
  request.send(new FormData(form));
  rest(true);
}

// Asks what a job would take, and shows the answer in its form. Of a file of lines the beginning is
// enough, with the size of the whole; any other one is sent, unless it is too large for that.
const BEGINNING_BYTES = 1 << 19;
const SENT_BYTES_MAX = 64 << 20;

async function estimate(event) {
  const button = event.submitter;
  if (!button?.matches("[data-estimate]")) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  const place = event.target.querySelector("[data-answer]");
  const body = new FormData(event.target);
  const file = body.get("file");
  if (file instanceof File && /\.(jsonl|ndjson|csv|tsv|txt)$/i.test(file.name)) {
    body.set("file", file.slice(0, BEGINNING_BYTES), file.name);
    body.set("bytes", file.size);
  } else if (file instanceof File && file.size > SENT_BYTES_MAX) {
    place.textContent = "Only files of lines are estimated: JSON Lines, CSV, TSV and plain text.";
    return;
  }
  button.disabled = true;
  place.textContent = "Estimating …";
  try {
    const answer = await fetch(button.formAction, {
      method: "POST", headers: { accept: "text/html" }, body,
    });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector("[data-estimate]");
    if (found) place.replaceChildren(...found.children);
    else place.textContent = page.querySelector("[data-reason]")?.textContent ?? answer.statusText;
  } catch {
    place.textContent = "There was no answer: ask again.";
  }
  button.disabled = false;
}

document.addEventListener("click", ask);
document.querySelector("form [data-answer]")?.closest("form").addEventListener("submit", estimate);
document.querySelector("form[data-upload]")?.addEventListener("submit", upload);
if (live) listen();
