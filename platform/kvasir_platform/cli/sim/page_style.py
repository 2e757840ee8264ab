"""The style and the script of the simulator's pages, which load nothing from anywhere else."""

from __future__ import annotations

STYLE = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); gap: .6rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.card b { display: block; font-size: 1.2rem; } .card span { color: var(--soft); font-size: .8rem; }
.player { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; position: sticky; top: 0;
  background: var(--page); padding: .5rem 0; z-index: 2; border-bottom: 1px solid var(--line); }
.player input[type=range] { flex: 1 1 14rem; accent-color: var(--c1); }
button, select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: .2rem .8rem; cursor: pointer; }
#stage { position: relative; } #links { position: absolute; inset: 0; width: 100%; height: 100%;
  pointer-events: none; } .pool { margin: .8rem 0 1.6rem; }
.workers { display: grid; grid-template-columns: repeat(auto-fill, minmax(13.5rem, 1fr)); gap: .7rem; }
.worker { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .45rem .6rem;
  font-size: .8rem; } .worker.x { border-color: var(--bad); opacity: .75; } .worker.gone { opacity: .25; }
.worker.w, .worker.d { border-style: dashed; } .worker b { display: flex; justify-content: space-between; }
.bar { display: grid; grid-template-columns: 3.6rem 1fr 2.9rem; gap: .4rem; align-items: center; }
.bar i { display: flex; height: .55rem; background: var(--track); border-radius: 3px; overflow: hidden; }
.bar u { display: block; height: 100%; } .bar em { font-style: normal; text-align: right; }
#marks { font-size: .82rem; color: var(--soft); min-height: 1.3rem; }
#curve { width: 100%; height: 150px; display: block; cursor: pointer; }
"""

SCRIPT = """
const D = JSON.parse(document.getElementById("data").textContent), F = D.frames, W = D.workers;
const $ = id => document.getElementById(id), last = F.length - 1, end = F[last].t;
const NS = "http://www.w3.org/2000/svg", STATE = {s: "", w: "starting", d: "draining", x: "lost"};
const most = {wait: 1, run: 1};
for (const f of F) for (const w of f.w) if (w) {
  most.wait = Math.max(most.wait, w[1]); most.run = Math.max(most.run, w[2] + w[3]); }
const make = (tag, parent, cls, text) => { const e = document.createElement(tag);
  if (cls) e.className = cls; if (text !== undefined) e.textContent = text; parent.append(e); return e; };
const boxes = W.map(() => null);
for (const pool of [...new Set(W.map(w => w[1]))]) {
  const section = make("section", $("pools"), "pool"), own = W.filter(w => w[1] === pool);
  make("h2", section, "", pool + " pool");
  const grid = make("div", section, "workers");
  W.forEach((w, i) => { if (w[1] !== pool) return;
    const box = make("div", grid, "worker"), head = make("b", box);
    make("span", head, "", w[0]); const state = make("span", head, "soft"), bars = {};
    for (const [key, label, colours] of [["wait", "queue", ["--bad"]], ["run", "batch", ["--c2", "--c1"]],
        ["kv", "KV", ["--c3"]]]) {
      const row = make("div", box, "bar"); make("span", row, "soft", label);
      const track = make("i", row), fills = colours.map(c => { const u = make("u", track);
        u.style.background = `var(${c})`; return u; });
      bars[key] = [fills, make("em", row)]; }
    boxes[i] = {box, state, bars}; }); }
function at(t) { let low = 0, high = last; while (low < high) { const m = (low + high + 1) >> 1;
  if (F[m].t <= t) low = m; else high = m - 1; } return low; }
function set(bar, parts, text) { bar[0].forEach((u, i) => u.style.width = (100 * parts[i]) + "%");
  bar[1].textContent = text; }
function centre(i) { const a = boxes[i].box.getBoundingClientRect(), s = $("stage").getBoundingClientRect();
  return [a.left + a.width / 2 - s.left, a.top + a.height / 2 - s.top]; }
let now = 0, playing = false, before = 0;
function draw(t) { now = Math.min(end, Math.max(0, t)); const f = F[at(now)];
  $("seek").value = now; $("time").textContent = now.toFixed(1) + " s of " + end.toFixed(1) + " s";
  $("queued").textContent = f.q; $("arrived").textContent = f.a; $("ended").textContent = f.e;
  $("metnow").textContent = f.m; $("refusednow").textContent = f.r;
  boxes.forEach((b, i) => { const w = f.w[i]; b.box.className = "worker " + (w ? w[0] : "gone");
    b.state.textContent = w ? STATE[w[0]] : "absent"; const v = w || ["s", 0, 0, 0, 0];
    set(b.bars.wait, [v[1] / most.wait], v[1]);
    set(b.bars.run, [v[2] / most.run, v[3] / most.run], v[2] + " + " + v[3]);
    set(b.bars.kv, [v[4] / 100], v[4] + " %"); });
  $("links").replaceChildren(); let moving = 0;
  for (const [begin, stop, source, target] of D.transfers) {
    if (begin > now || stop + D.step < now || source < 0) continue;
    if (++moving > 60) break;
    const line = document.createElementNS(NS, "line"), [x1, y1] = centre(source), [x2, y2] = centre(target);
    for (const [k, v] of Object.entries({x1, y1, x2, y2})) line.setAttribute(k, v);
    line.setAttribute("stroke", "var(--c4)"); line.setAttribute("stroke-width", 1.5);
    line.setAttribute("stroke-opacity", .6); $("links").append(line); }
  $("moving").textContent = moving;
  const said = D.events.filter(e => e[0] <= now && e[0] > now - end / 12);
  $("marks").textContent = said.map(e => e[0].toFixed(0) + " s: " + e[1]).join("; "); curve(); }
function curve() { const c = $("curve"), r = window.devicePixelRatio || 1;
  const w = c.clientWidth, h = c.clientHeight;
  c.width = w * r; c.height = h * r; const g = c.getContext("2d"); g.scale(r, r);
  const css = getComputedStyle(document.documentElement), colour = n => css.getPropertyValue(n).trim();
  const lines = [["--c1", F.map(f => f.w.reduce((s, x) => s + (x ? x[2] + x[3] : 0), 0))],
    ["--bad", F.map(f => f.q + f.w.reduce((s, x) => s + (x ? x[1] : 0), 0))]];
  const top = Math.max(1, ...lines.flatMap(l => l[1])), x = t => t / end * (w - 40) + 36,
    y = v => h - 18 - v / top * (h - 30);
  g.font = "11px system-ui"; g.fillStyle = colour("--soft"); g.strokeStyle = colour("--line");
  for (const v of [0, top / 2, top]) { g.beginPath(); g.moveTo(36, y(v)); g.lineTo(w, y(v)); g.stroke();
    g.fillText(Math.round(v), 2, y(v) + 4); }
  for (let k = 0; k <= 6; k++) g.fillText((end * k / 6).toFixed(0) + " s", x(end * k / 6) - 10, h - 4);
  for (const e of D.events) { g.strokeStyle = colour("--c4"); g.beginPath(); g.moveTo(x(e[0]), 4);
    g.lineTo(x(e[0]), h - 18); g.stroke(); }
  for (const [name, values] of lines) { g.strokeStyle = colour(name); g.lineWidth = 1.6; g.beginPath();
    values.forEach((v, i) => i ? g.lineTo(x(F[i].t), y(v)) : g.moveTo(x(F[i].t), y(v))); g.stroke(); }
  g.strokeStyle = colour("--ink"); g.lineWidth = 1; g.beginPath(); g.moveTo(x(now), 2);
  g.lineTo(x(now), h - 18); g.stroke(); }
function tick(ms) { if (!playing) return; const gone = (ms - before) / 1000; before = ms;
  draw(now + gone * Number($("speed").value) * end / 30); if (now >= end) pause();
  else requestAnimationFrame(tick); }
function pause() { playing = false; $("play").textContent = "Play"; }
$("play").onclick = () => { if (playing) { pause(); return; } if (now >= end) now = 0;
  playing = true; $("play").textContent = "Pause"; before = performance.now(); requestAnimationFrame(tick); };
$("seek").max = end; $("seek").step = end / 1000;
$("seek").oninput = () => draw(Number($("seek").value));
$("curve").onclick = e => draw((e.offsetX - 36) / ($("curve").clientWidth - 40) * end);
addEventListener("resize", () => draw(now));
document.addEventListener("keydown", e => { if (e.target.tagName === "SELECT") return;
  if (e.key === " ") { e.preventDefault(); $("play").onclick(); }
  if (e.key === "ArrowRight") draw(now + end / 100); if (e.key === "ArrowLeft") draw(now - end / 100); });
const asked = /t=([0-9.]+)/.exec(location.hash);
draw(asked ? Number(asked[1]) * end : 0); document.body.dataset.ready = "yes";
"""
