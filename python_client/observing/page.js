"use strict";
// Text from workers is only inserted as text, never as markup.

const VERDICTS = ["lost", "failed", "stuck", "behind", "current"];
const ROWS = 200;  // the most rows drawn at once, since each takes time
const CARDS = 12;  // the most models drawn at once, with their charts
const WIDTH = 1000, HEIGHT = 100;  // of a chart, in its own units

// Formatting and selection, without the DOM, so that tests can run it.

// The same as in `bus/units.py`.
function span(seconds) {
  for (const [limit, unit, length, digits] of [
    [95e-6, "µs", 1e-6, 0], [9.95e-3, "ms", 1e-3, 1], [0.9995, "ms", 1e-3, 0], [9.95, "s", 1, 1],
    [119.5, "s", 1, 0], [119.5 * 60, "min", 60, 0], [47.5 * 3600, "h", 3600, 0], [Infinity, "d", 86400, 0],
  ]) {
    if (seconds >= limit) continue;
    const scale = 10 ** digits, count = Math.floor(Math.max(0, seconds) / length * scale + 0.5) / scale;
    return count ? `${count.toFixed(digits)} ${unit}` : "0 s";
  }
}

function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 999.5) return `${n < 9.95 && unit != "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

const counted = (n, noun) => `${n} ${noun}${n == 1 ? "" : "s"}`;

// How versions reach a worker: the transport, and the relays before it.
const way = s => s.road + (s.through?.length ? ` via ${s.through.join(" > ")}` : "") + (s.relay ? " (relay)" : "");

// The columns: the name, and a function that returns the text for a worker's data of age `old`, in seconds.
const COLUMNS = [
  ["worker", s => s.worker], ["model", s => s.model], ["state", s => s.verdict], ["version", s => s.version || "none"],
  ["behind", (s, old) => s.lag ? `${s.lag}` + (s.lag_s == null ? "" : `, ${span(s.lag_s + old)}`) : ""],
  ["doing", (s, old) => s.verdict == "lost" ? `silent ${span(s.silent_s + old)}` : s.phase || (s.verdict == "current" && s.took_s ? `applied in ${span(s.took_s)}` : "")],
  ["rate", s => s.rate ? `${bytes(s.rate)}/s` : ""], ["language", s => s.language], ["host", s => s.host],
  ["road", way], ["encoding", s => s.encoding], ["error", s => s.error],
];

const WORDS = ["worker", "host", "error"];  // columns with long texts

const SORTS = {
  trouble: (a, b) => VERDICTS.indexOf(a.verdict) - VERDICTS.indexOf(b.verdict) || b.lag - a.lag,
  worker: () => 0, model: (a, b) => a.model < b.model ? -1 : +(a.model > b.model),
  lag: (a, b) => b.lag - a.lag, rate: (a, b) => b.rate - a.rate, applied: (a, b) => b.took_s - a.took_s,
};

// The settings of a view that are in the URL, with their defaults.
const VIEW = { filter: "", state: "", model: "", sort: "trouble", rows: ROWS };

function viewOf(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, "")), view = { ...VIEW };
  for (const name in VIEW) if (given.has(name)) view[name] = given.get(name);
  if (!Object.hasOwn(SORTS, view.sort)) view.sort = VIEW.sort;
  if (!VERDICTS.includes(view.state)) view.state = VIEW.state;
  view.rows = Math.max(ROWS, Math.floor(+view.rows) || 0);
  return view;
}

function hashOf(view) {
  const given = new URLSearchParams();
  for (const name in VIEW) if (view[name] != VIEW[name]) given.set(name, view[name]);
  return `#${given}`;
}

function chosen(workers, view) {  // returns the rows that the view selects, sorted
  const text = view.filter.toLowerCase();
  return workers.filter(s => (!view.state || s.verdict == view.state) && (!view.model || s.model == view.model)
      && (!text || [s.worker, s.model, s.verdict, s.host, s.language, way(s), s.error].join(" ").toLowerCase().includes(text)))
    .sort((a, b) => SORTS[view.sort](a, b) || (a.worker < b.worker ? -1 : +(a.worker > b.worker)));
}

// The publisher's history: the moments of each model, by their index `at`.
const past = { models: new Map(), now: 0, at: 0, moment_s: 5, moments: 180 };

function remember(history, at) {
  if (history.since < 0) past.models.clear();  // the whole history follows
  Object.assign(past, { now: history.now, at, moment_s: history.moment_s, moments: history.moments });
  const first = Math.floor(history.now) - history.moments + 1;
  for (const name in history.models) {
    if (!past.models.has(name)) past.models.set(name, new Map());
    const moments = past.models.get(name);
    for (const values of history.models[name]) {
      const moment = Object.fromEntries(history.fields.map((field, i) => [field, values[i]]));
      moments.set(moment.at, moment);
    }
  }
  for (const [name, moments] of past.models) {
    for (const number of moments.keys()) if (number < first) moments.delete(number);
    if (!moments.size) past.models.delete(name);
  }
}

const most = (moments, of) => moments.reduce((high, m) => Math.max(high, of(m)), 0);

function bars(moments, height) {  // returns an SVG path with a bar for each moment; `height` returns 0 to 1
  const first = Math.floor(past.now) - past.moments + 1, wide = WIDTH / past.moments;
  return moments.filter(m => height(m) > 0).map(m => {
    const x = (m.at - first) * wide, y = HEIGHT * (1 - Math.min(1, height(m)));
    return `M${x.toFixed(1)} ${HEIGHT}V${y.toFixed(1)}h${(0.8 * wide).toFixed(1)}V${HEIGHT}Z`;
  }).join("");
}

function momentText(m) {  // returns a moment as text
  const ago = (past.now - m.at - 0.5) * past.moment_s;
  return [`${span(Math.max(0, ago))} ago: version ${m.version || "none"}`,
    m.publishes && (m.publishes == 1 ? "1 publish" : `${m.publishes} publishes`) + (m.short ? `, ${m.short} fell short` : ""),
    m.applied_s && `applied within ${span(m.applied_s)}`,
    m.late && `${m.late} not up to date` + (m.bad ? `, of these ${m.bad} lost, failed or stuck` : ""),
    m.lag && `${m.who} behind by ${m.lag}` + (m.lag_s ? `, ${span(m.lag_s)}` : "")].filter(Boolean).join("; ");
}
// The page.
const $ = id => document.getElementById(id);
const make = (tag, text, kind) => { const e = document.createElement(tag); e.textContent = text; if (kind) e.className = kind; return e; };
const put = (e, text) => { if (e.textContent !== text) e.textContent = text; };  // unchanged text keeps the user's selection
const reorder = (e, children) => { if (children.length != e.children.length || children.some((c, i) => e.children[i] !== c)) e.replaceChildren(...children); };
let state = null, at = 0, view = viewOf(location.hash), live = false, lostAt = 0, due = false;  // lostAt: 0, or when the connection was lost
const rows = new Map(), cards = new Map();  // the drawn elements: rows by worker and model, cards by model

$("head").append(...COLUMNS.map(([name]) => make("th", name)));

function link(text, change) {  // returns a link to another view of this page
  const a = make("a", text);
  a.href = hashOf({ ...VIEW, ...change });
  return a;
}

function svg(tag, attributes) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) e.setAttribute(name, attributes[name]);
  return e;
}

function axis(card, moment) {  // writes below the charts: the times, or the moment at the pointer
  put(card.then, moment ? momentText(moment) : `${span(past.moments * past.moment_s)} ago`);
  put(card.now, moment ? "" : "now");
}

function chart(card) {  // returns an empty chart, which shows the moment at the pointer
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  picture.addEventListener("pointermove", e => {
    const box = picture.getBoundingClientRect();
    const number = Math.floor(past.now) - past.moments + 1 + Math.floor((e.clientX - box.left) / box.width * past.moments);
    const moment = past.models.get(card.name)?.get(number);
    axis(card, moment);
  });
  picture.addEventListener("pointerleave", () => axis(card));
  return picture;
}

function series(picture, kinds, words) {
  picture.replaceChildren(...kinds.map(([kind, d]) => svg("path", { class: kind, d })));
  picture.setAttribute("aria-label", words);
}

function cardOf(name) {
  if (!cards.has(name)) {
    const card = { name, title: make("b", ""), about: make("div", "", "dim"), metadata: make("div", ""), took: make("div", ""), late: make("div", ""), then: make("span", ""), now: make("span", "") };
    card.tooks = chart(card); card.lates = chart(card);
    const at = make("div", "", "at dim");
    at.append(card.then, card.now);
    card.box = make("div", "", "card");
    card.box.append(card.title, card.about, card.metadata, card.took, card.tooks, card.late, card.lates, at);
    axis(card);
    cards.set(name, card);
  }
  return cards.get(name);
}

function drawCard(m, mine, old) {
  const card = cardOf(m.name), moments = [...(past.models.get(m.name)?.values() || [])].sort((a, b) => a.at - b.at);
  const slowest = most(moments, x => x.applied_s), crowd = Math.max(1, most(moments, x => x.late));
  const now = most(mine.filter(s => s.verdict == "current"), s => s.took_s), late = mine.filter(s => s.verdict != "current").length;
  const publishes = moments.reduce((n, x) => n + x.publishes, 0), short = moments.reduce((n, x) => n + x.short, 0);
  const minutes = span(past.moments * past.moment_s);
  put(card.title, `${m.name} ${m.version}`);
  put(card.about, `${bytes(m.nbytes)}, ${m.encoding}` + (m.age_s == null ? "" : `, ${span(m.age_s + old)} ago`)
    + `; in ${minutes} ${publishes} published` + (short ? `, ${short} fell short` : ""));
  const metadata = Object.entries(m.metadata).map(([name, text]) => `${name}: ${text}`);  // the metadata of this version
  if (card.words !== metadata.join("\n")) { card.words = metadata.join("\n"); card.metadata.replaceChildren(...metadata.map(text => make("div", text, "metadata"))); }
  put(card.took, now || slowest ? `applied within ${span(now)} (at most ${span(slowest)})` : "not applied yet");
  put(card.late, `${late} of ${mine.length} not up to date (at most ${most(moments, x => x.late)})`);
  series(card.tooks, [["took", bars(moments, x => slowest && x.applied_s / slowest)], ["short", bars(moments, x => x.short ? 0.08 : 0)]],
    `Seconds until all workers had applied what was published, for ${minutes}: at most ${span(slowest)}`);
  series(card.lates, [["late", bars(moments, x => x.late / crowd)], ["wrong", bars(moments, x => x.bad / crowd)]],
    `Workers that were not up to date, for ${minutes}: at most ${most(moments, x => x.late)}`);
  return card.box;
}

function drawModels(old) {
  const by = new Map(state.models.map(m => [m.name, []]));
  for (const s of state.workers) by.get(s.model)?.push(s);
  const worst = name => Math.min(VERDICTS.length, ...new Set(by.get(name).map(s => VERDICTS.indexOf(s.verdict))));
  const models = state.models.filter(m => !view.model || m.name == view.model).map(m => [worst(m.name), m]).sort((a, b) => a[0] - b[0]).map(([, m]) => m);
  reorder($("models"), models.slice(0, CARDS).map(m => drawCard(m, by.get(m.name), old)));
  put($("models-more"), models.length > CARDS ? `${counted(models.length - CARDS, "more model")}: choose one below` : "");
  const names = ["", ...state.models.map(m => m.name)];
  if (view.model && !names.includes(view.model)) names.push(view.model);
  reorder($("model"), names.map(name => [...$("model").children].find(o => o.value == name) || Object.assign(make("option", name || "all models"), { value: name })));
  $("model").value = view.model;
  for (const name of cards.keys()) if (!by.has(name)) cards.delete(name);
}

function trouble(t) {
  const item = make("li", "", t.state), title = make("b", "");
  title.append(t.verdict ? link(t.text, { state: t.verdict, model: t.model }) : t.text);
  item.append(title);
  if (t.advice) item.append(make("span", t.advice, "dim"));
  return item;
}

function drawTroubles() {  // draws the problems, above everything else
  const found = live || !lostAt ? [] : [{ state: "problem", text: `nothing has answered for ${span((Date.now() - lostAt) / 1000)}: what is below was so before` }];
  if (state) found.push(...state.troubles);
  const workers = state && new Set(state.workers.map(s => s.worker)).size, late = state && state.workers.filter(s => s.verdict != "current").length;
  if (state && !found.length) found.push({ state: "well", text: late ? `${counted(workers, "worker")}: all is well, ${late} at it` : `${counted(workers, "worker")}: all are up to date` });
  const words = JSON.stringify(found);
  if ($("wrong").dataset.words != words) {
    $("wrong").dataset.words = words;
    $("wrong").replaceChildren(...found.map(trouble));
  }
  const problems = found.filter(t => t.state == "problem").length;
  document.title = (problems ? `(${problems}) ` : "") + "weightbus";
}

function drawStates() {
  const counts = new Map(VERDICTS.map(v => [v, 0]));
  for (const s of state.workers) if (!view.model || s.model == view.model) counts.set(s.verdict, counts.get(s.verdict) + 1);
  const shown = VERDICTS.filter(v => counts.get(v) || v == view.state);
  const all = [...counts.values()].reduce((a, b) => a + b, 0);
  const words = [["", `${all} all`], ...shown.map(v => [v, `${counts.get(v)} ${v}`])];
  reorder($("states"), words.map(([value, text]) => {
    const button = [...$("states").children].find(b => b.value == value) || Object.assign(make("button", "", value), { value });
    put(button, text);
    button.setAttribute("aria-pressed", view.state == value);
    return button;
  }));
}

function drawRow(s, old) {
  const key = `${s.worker}/${s.model}`;
  let row = rows.get(key);
  if (!row) {
    row = document.createElement("tr");
    row.append(...COLUMNS.map(([name]) => { const cell = make("td", "", WORDS.includes(name) ? "words" : "num"); cell.dataset.label = name; return cell; }));
    row.cells[0].append(link(s.worker, { filter: s.worker }));
    rows.set(key, row);
  }
  COLUMNS.forEach(([name, of], i) => { if (i) put(row.cells[i], String(of(s, old))); if (name == "state") row.cells[i].className = s.verdict; });
  return row;
}

function draw() {
  due = false;
  drawTroubles();
  if (!state) return;
  const old = (Date.now() - at) / 1000, wanted = chosen(state.workers, view), drawn = wanted.slice(0, view.rows);
  drawModels(old);
  drawStates();
  const kept = new Set(drawn.map(s => drawRow(s, old)));
  reorder($("workers"), [...kept]);
  for (const [key, row] of rows) if (!kept.has(row)) rows.delete(key);
  const more = wanted.length - drawn.length;
  put($("more"), more ? counted(more, "more row") : wanted.length ? "" : "no such rows");
  $("show-more").hidden = !more;
  $("events").replaceChildren(...[...state.events].reverse().map(e => make("li", `${span(e.age_s + old)} ago: ${e.text}`)));
}

function soon() {  // draws in the next frame, once for all events until then
  if (document.hidden) drawTroubles();  // it sets the title, which is visible nevertheless
  else if (!due) { due = true; requestAnimationFrame(draw); }
}

function changeView(change) {  // changes the view, and the URL with it
  view = viewOf(hashOf({ ...view, rows: ROWS, ...change }));
  history.replaceState(null, "", hashOf(view));
  soon();
}

function controls() {
  $("filter").value = view.filter;
  $("sort").value = view.sort;
}

function theme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  $("theme").value = value;
}

const kept = { get: () => { try { return localStorage.getItem("theme") || ""; } catch { return ""; } }, set: v => { try { localStorage.setItem("theme", v); } catch { /* it is not kept then */ } } };
theme(["light", "dark"].includes(kept.get()) ? kept.get() : "");
controls();
$("theme").addEventListener("change", e => { theme(e.target.value); kept.set(e.target.value); });
$("filter").addEventListener("input", e => changeView({ filter: e.target.value }));
$("sort").addEventListener("change", e => changeView({ sort: e.target.value }));
$("model").addEventListener("change", e => changeView({ model: e.target.value }));
$("states").addEventListener("click", e => { if (e.target.tagName == "BUTTON") changeView({ state: e.target.value }); });
$("show-more").addEventListener("click", () => changeView({ rows: view.rows + ROWS }));
$("copy").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(location.href); put($("copy"), "copied"); } catch { put($("copy"), "it is in the address bar"); }
  setTimeout(() => put($("copy"), "copy link"), 2000);
});
addEventListener("hashchange", () => { view = viewOf(location.hash); controls(); soon(); });
document.addEventListener("visibilitychange", soon);
const source = new EventSource("events");
source.addEventListener("history", e => { remember(JSON.parse(e.data), Date.now()); soon(); });
source.onmessage = e => { state = JSON.parse(e.data); at = Date.now(); soon(); };
source.onopen = () => { live = true; lostAt = 0; put($("link"), "live"); $("link").className = ""; soon(); };
source.onerror = () => { live = false; lostAt = lostAt || Date.now(); put($("link"), "nothing answers"); $("link").className = "gone"; soon(); };
setInterval(soon, 1000);
