// Draws the timelines and the memory of a report from the packed columns of its page.
//
// Events of a row stand in the order of time and do not overlap, so what is in view is found by binary search. A line of
// pixels is made for each row in view and copied down its band. Where events are narrower than a pixel, a pixel gets
// their colours by the share of it that each takes; where a pixel holds very many, they are sampled. Where rows are
// lower than a pixel, one of them is drawn while the view moves, and several are mixed once it rests.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const report = window.report = { ready: false, firstPicture: 0, frames: [], panels: [], error: "" };
  document.body.classList.add("scripted");
  const status = document.getElementById("status"), note = document.getElementById("note");
  const MIXED = 6, SAMPLE_ABOVE = 4, LABEL = 92;

  // ------------------------------------------------------------------------------------------------------- columns

  async function column(of) {
    const element = document.getElementById("column" + of.text), packed = atob(element.textContent);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    element.remove();
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const n = of.length, values = new Uint32Array(n);
    for (let plane = 0; plane < of.width; plane++)
      for (let i = 0, at = plane * n, shift = 8 * plane; i < n; i++) values[i] |= planes[at + i] << shift;
    if (of.differences) for (let i = 0, sum = 0; i < n; i++)
      values[i] = sum = (sum + ((values[i] >>> 1) ^ -(values[i] & 1))) | 0;
    return values;
  }

  async function unpack(panel) {
    const [offsets, gap, length, name, item] = await Promise.all(
      [panel.offsets, panel.gap, panel.length, panel.name, panel.item].map(column));
    const start = gap;                                 // in place: of millions of events, each array is many megabytes
    for (let i = 0, end = 0; i < start.length; i++) {
      start[i] = end + ((gap[i] >>> 1) ^ -(gap[i] & 1));
      end = start[i] + length[i];
    }
    return { offsets, start, length, name, item };
  }

  // -------------------------------------------------------------------------------------------------------- colours

  function rgb(text) {
    const full = text.trim().replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
    return [1, 3, 5].map(at => parseInt(full.slice(at, at + 2), 16));
  }
  const theme = {};
  function readTheme() {
    const style = getComputedStyle(document.body);
    for (const name of ["ink", "soft", "line", "faint", "paper"]) theme[name] = style.getPropertyValue("--gt-" + name).trim();
    theme.kinds = data.kinds.map(kind => rgb(kind[1]));
    theme.idle = rgb(theme.faint).map((value, k) => value * .45 + rgb(theme.paper)[k] * .55);
  }

  // --------------------------------------------------------------------------------------------------------- panels

  const pixel = (r, g, b) => 0xff000000 | b << 16 | g << 8 | r;

  class Timeline {
    constructor(of, canvas, columns) {
      Object.assign(this, of, columns, { canvas });
      this.context = canvas.getContext("2d", { alpha: false });
      this.shown = Uint32Array.from(this.rows.keys());
      this.visible = new Uint8Array(this.names.length).fill(1);
      this.colour = Uint8Array.from(this.names, name => name[1]);
      this.last = Math.max(this.end / this.tick, 1);
      this.top = 0; this.bottom = this.shown.length;
    }

    size() {
      const ratio = window.devicePixelRatio || 1;
      this.width = Math.max(Math.round(this.canvas.clientWidth * ratio), 200);
      const most = Math.round(340 * ratio), wanted = Math.round((this.rows.length * 22 + 20) * ratio);
      this.height = Math.min(most, Math.max(wanted, 60 * ratio));
      this.canvas.style.height = this.height / ratio + "px";
      this.canvas.width = this.width; this.canvas.height = this.height;
      this.ratio = ratio; this.left = Math.round(LABEL * ratio); this.foot = Math.round(16 * ratio);
      const w = this.inner = this.width - this.left, h = this.tall = this.height - this.foot;
      this.image = this.context.createImageData(w, h);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.line = new Uint32Array(w);
      this.mix = [0, 1, 2, 3].map(() => new Float32Array(w));
    }

    // The first event of a row that ends after a time.
    find(row, time) {
      let low = this.offsets[row], high = this.offsets[row + 1];
      while (low < high) {
        const middle = (low + high) >>> 1;
        if (this.start[middle] + this.length[middle] > time) high = middle; else low = middle + 1;
      }
      return low;
    }

    // Add the events of a row to the mix of a line of pixels.
    add(row, t0, scale, weight) {
      const { start, length, name, visible, colour, inner } = this, [red, green, blue, share] = this.mix;
      const stop = this.offsets[row + 1], t1 = t0 + inner / scale, first = this.find(row, t0);
      const put = (x, part, kind) => {
        red[x] += part * kind[0]; green[x] += part * kind[1]; blue[x] += part * kind[2]; share[x] += part;
      };
      let inView = 0;                                  // whether there are too many to look at each
      if (stop - first > SAMPLE_ABOVE * inner) inView = this.find(row, t1) - first;
      if (inView > SAMPLE_ABOVE * inner) {
        for (let x = 0, at = first; x < inner; x++) {
          const time = t0 + (x + .5) / scale;
          let step = 1;                                // gallop, then halve
          while (at + step < stop && start[at + step] + length[at + step] <= time) { at += step; step *= 2; }
          for (; step >= 1; step >>>= 1) if (at + step < stop && start[at + step - 1] + length[at + step - 1] <= time) at += step;
          if (at < stop && start[at] <= time && time < start[at] + length[at] && visible[name[at]])
            put(x, weight, theme.kinds[colour[name[at]]]);
        }
        return;
      }
      for (let i = first; i < stop && start[i] < t1; i++) {
        if (!visible[name[i]]) continue;
        const a = Math.max((start[i] - t0) * scale, 0), b = Math.min((start[i] + length[i] - t0) * scale, inner);
        const kind = theme.kinds[colour[name[i]]];
        let x = a | 0;
        const end = b | 0;
        if (x === end) { if (x < inner) put(x, weight * Math.max(b - a, .08), kind); continue; }
        put(x, weight * (x + 1 - a), kind);
        for (x++; x < end; x++) put(x, weight, kind);
        if (end < inner) put(end, weight * (b - end), kind);
      }
    }

    lineOf(rows, t0, scale, gaps) {
      const [red, green, blue, share] = this.mix, { line, inner } = this, [r, g, b] = theme.idle;
      for (const part of this.mix) part.fill(0);
      for (const row of rows) this.add(row, t0, scale, 1 / rows.length);
      for (let x = 0; x < inner; x++) {
        const rest = Math.max(1 - share[x], 0), most = Math.max(share[x], 1);
        line[x] = pixel((red[x] + rest * r) / most, (green[x] + rest * g) / most, (blue[x] + rest * b) / most);
      }
      if (gaps) {                                      // where events are wide, a darker edge parts them
        for (const row of rows) for (let i = this.find(row, t0); i < this.offsets[row + 1]; i++) {
          const x = (this.start[i] - t0) * scale;
          if (x >= inner) break;
          if (x >= 0 && this.length[i] * scale >= 4) line[x | 0] = pixel(...rgb(theme.paper));
        }
      }
    }

    draw(resting) {
      const began = performance.now(), { context, pixels, inner, tall } = this;
      const t0 = view.t0 / this.tick, scale = inner / Math.max((view.t1 - view.t0) / this.tick, 1e-9);
      const rows = this.bottom - this.top, band = tall / Math.max(rows, 1e-9), paper = pixel(...rgb(theme.paper));
      pixels.fill(paper);
      const high = band >= 1 ? rows : tall;            // bands: of a row each, or a pixel each
      for (let nth = 0; nth < high; nth++) {
        const from = band >= 1 ? Math.round(nth * band) : nth;
        const to = band >= 1 ? Math.round((nth + 1) * band) : nth + 1;
        let chosen;
        if (band >= 1) {
          const at = Math.floor(this.top) + nth;
          if (at >= this.shown.length) break;
          chosen = [this.shown[at]];
        } else {
          const first = Math.floor(this.top + nth / band), after = Math.min(Math.ceil(this.top + (nth + 1) / band), this.shown.length);
          const many = resting ? Math.min(MIXED, after - first) : 1;
          chosen = Array.from({ length: many }, (_, k) => this.shown[first + Math.floor(k * (after - first) / many)]);
          if (!(first < this.shown.length)) break;
        }
        this.lineOf(chosen, t0, scale, band >= 5);
        const gap = band >= 6 ? 1 : 0;
        for (let y = from; y < Math.min(to - gap, tall); y++) pixels.set(this.line, y * inner);
      }
      context.fillStyle = theme.paper;
      context.fillRect(0, 0, this.width, this.height);
      context.putImageData(this.image, this.left, 0);
      this.writeLabels(band, t0, scale);
      this.writeScale();
      return performance.now() - began;
    }

    writeLabels(band, t0, scale) {
      const { context, ratio } = this, size = Math.min(11 * ratio, Math.max(band * .8, 9 * ratio));
      context.font = `${size}px ui-monospace, Menlo, Consolas, monospace`;
      context.textBaseline = "middle";
      const step = Math.max(1, Math.ceil((size + 3) / band));
      for (let at = Math.ceil(Math.floor(this.top) / step) * step; at < Math.min(this.bottom, this.shown.length); at += step) {
        const y = (at - Math.floor(this.top) + .5) * band;
        context.fillStyle = theme.ink; context.textAlign = "right";
        context.fillText(this.rows[this.shown[at]].slice(0, 14), this.left - 5 * ratio, Math.max(y, size * .6));
        if (band < 12 * ratio) continue;
        context.fillStyle = "#111"; context.textAlign = "center";
        const row = this.shown[at], letter = size * .61;
        for (let i = this.find(row, t0); i < this.offsets[row + 1]; i++) {
          const a = Math.max((this.start[i] - t0) * scale, 0), b = Math.min((this.start[i] + this.length[i] - t0) * scale, this.inner);
          if (a >= this.inner) break;
          if (b - a < letter * 1.6 || !this.visible[this.name[i]]) continue;
          const text = this.details.length ? this.names[this.name[i]][0] : String(this.item[i]), fits = Math.floor((b - a) / letter - .5);
          if (text.length <= fits || fits > 4) context.fillText(text.slice(0, fits), this.left + (a + b) / 2, y);
        }
      }
    }

    writeScale() {
      const { context, ratio } = this, span = view.t1 - view.t0, raw = span / Math.max(this.inner / (110 * ratio), 1);
      const power = 10 ** Math.floor(Math.log10(raw)), step = power * [1, 2, 5, 10].find(n => n * power >= raw);
      context.font = `${10 * ratio}px ui-monospace, Menlo, Consolas, monospace`;
      context.fillStyle = theme.soft; context.textAlign = "center"; context.textBaseline = "alphabetic";
      for (let time = Math.ceil(view.t0 / step) * step; time <= view.t1; time += step) {
        const x = this.left + (time - view.t0) / span * this.inner;
        context.fillRect(x, this.tall, 1, 4 * ratio);
        context.fillText(spelled(time, step), x, this.height - 2 * ratio);
      }
    }

    at(x, y) {                                         // the event below the mouse, in pixels of the page
      const row = Math.floor(this.top + (y * this.ratio) / (this.tall / (this.bottom - this.top)));
      if (x * this.ratio < this.left || row >= this.shown.length || y * this.ratio >= this.tall) return "";
      const time = (view.t0 + (x * this.ratio - this.left) / this.inner * (view.t1 - view.t0)) / this.tick;
      const own = this.shown[row], i = this.find(own, time);
      if (i >= this.offsets[own + 1] || this.start[i] > time || !this.visible[this.name[i]]) return `${this.rows[own]}: idle`;
      const [text, kind] = this.names[this.name[i]], from = this.start[i] * this.tick, took = this.length[i] * this.tick;
      const detail = this.details.length ? this.details[this.item[i]] : `micro-batch ${this.item[i]}`;
      return `${this.rows[own]}: ${text}${text === data.kinds[kind][0] ? "" : ` (${data.kinds[kind][0]})`}\n${detail}\n` +
        `from ${spelled(from)}, takes ${spelled(took)}`;
    }
  }

  function spelled(time, step = 0) {
    const digits = step ? Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(time) / step, 1))) + 1) : 4;
    const number = value => String(+value.toPrecision(Math.min(digits, 15)));
    if (data.unit !== "s") return number(time);
    const size = Math.abs(step || time);
    return size >= 1 || time === 0 ? number(time) + " s" : size >= 1e-3 ? number(time * 1e3) + " ms" : number(time * 1e6) + " us";
  }

  // ----------------------------------------------------------------------------------------------------------- view

  const view = report.view = { t0: 0, t1: 1 };
  let whole = 1, asked = 0, pending = 0, resting = 0;

  function draw(rest) {
    let took = 0;
    for (const panel of report.panels) took += panel.draw(rest);
    if (!rest) report.frames.push(took);
    drawMemory();
  }

  function changed() {                                 // once per frame, and finer when nothing has moved for a while
    if (!asked) asked = performance.now();
    if (!pending) pending = requestAnimationFrame(() => {
      pending = 0;
      draw(false);
      report.latest = performance.now() - asked; asked = 0;
      clearTimeout(resting);
      resting = setTimeout(() => draw(true), 120);
    });
  }

  function show(t0, t1) {
    const least = whole * 1e-7, span = Math.min(Math.max(t1 - t0, least), whole * 1.02);
    view.t0 = Math.min(Math.max(t0, -whole * .01), whole * 1.01 - span); view.t1 = view.t0 + span;
    changed();
  }
  function zoom(factor, centre = (view.t0 + view.t1) / 2) {
    show(centre - (centre - view.t0) * factor, centre + (view.t1 - centre) * factor);
  }
  function showRows(panel, top, bottom) {
    const rows = Math.min(Math.max(Math.round(bottom - top), 1), panel.shown.length);
    panel.top = Math.min(Math.max(Math.round(top), 0), panel.shown.length - rows); panel.bottom = panel.top + rows;
    changed();
  }
  function all() {
    for (const panel of report.panels) { panel.top = 0; panel.bottom = Math.max(panel.shown.length, 1); }
    show(0, whole);
  }
  Object.assign(report, { show, zoom, all, showRows, changed });

  function listen(panel) {
    const { canvas } = panel;
    let held = null;
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      const turned = event.deltaY || event.deltaX, factor = Math.exp(Math.max(Math.min(turned, 300), -300) / 400);
      if (event.shiftKey) {
        const at = panel.top + event.offsetY * panel.ratio / panel.tall * (panel.bottom - panel.top);
        return showRows(panel, at - (at - panel.top) * factor, at + (panel.bottom - at) * factor);
      }
      const x = (event.offsetX * panel.ratio - panel.left) / panel.inner;
      zoom(factor, view.t0 + Math.min(Math.max(x, 0), 1) * (view.t1 - view.t0));
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      held = { x: event.clientX, y: event.clientY, t0: view.t0, t1: view.t1, top: panel.top, bottom: panel.bottom };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", event => {
      if (held) {
        const time = (held.x - event.clientX) * panel.ratio / panel.inner * (held.t1 - held.t0);
        const rows = Math.round((held.y - event.clientY) * panel.ratio / panel.tall * (held.bottom - held.top));
        if (rows) showRows(panel, held.top + rows, held.bottom + rows);
        show(held.t0 + time, held.t1 + time);
      }
      tell(held ? "" : panel.at(event.offsetX, event.offsetY), event);
    });
    canvas.addEventListener("pointerleave", event => tell("", event));
    canvas.addEventListener("dblclick", all);
    canvas.addEventListener("keydown", event => {
      const span = view.t1 - view.t0, rows = panel.bottom - panel.top, step = Math.max(1, Math.round(rows / 5));
      const keys = { ArrowLeft: () => show(view.t0 - span / 5, view.t1 - span / 5), ArrowRight: () => show(view.t0 + span / 5, view.t1 + span / 5),
        ArrowUp: () => showRows(panel, panel.top - step, panel.bottom - step), ArrowDown: () => showRows(panel, panel.top + step, panel.bottom + step),
        "+": () => zoom(.6), "-": () => zoom(1 / .6), "0": all };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
  }

  function tell(text, event) {
    note.style.display = text ? "block" : "none";
    note.textContent = text;
    note.style.left = Math.min(event.clientX + 14, window.innerWidth - 300) + "px";
    note.style.top = event.clientY + 14 + "px";
  }

  // -------------------------------------------------------------------------------------------------------- filters

  function wantedRanks(text) {
    if (!text.trim()) return () => true;
    const parts = text.split(",").map(part => part.trim()).filter(Boolean).map(part => /^(\d+)(?:-(\d+))?$/.exec(part));
    if (parts.some(part => !part)) return null;
    return rank => parts.some(part => rank >= +part[1] && rank <= +(part[2] ?? part[1]));
  }

  function filter() {
    const kinds = new Set();
    document.querySelectorAll("#kinds input").forEach((box, k) => { if (box.checked) kinds.add(k); });
    const part = document.getElementById("names").value.trim().toLowerCase();
    const wanted = wantedRanks(document.getElementById("ranks").value);
    if (!wanted) { status.textContent = "ranks are written as 0-7, 12"; return; }
    let events = 0;
    for (const panel of report.panels) {
      panel.names.forEach(([text, kind], k) => {
        panel.visible[k] = kinds.has(kind) && (!part || text.toLowerCase().includes(part)) ? 1 : 0;
      });
      const shown = Uint32Array.from(panel.rows.keys()).filter(row => wanted(panel.ranks[row]));
      if (shown.length !== panel.shown.length) { panel.top = 0; panel.bottom = Math.max(shown.length, 1); }
      panel.shown = shown;
      events += shown.length;
    }
    status.textContent = part || kinds.size < data.kinds.length || document.getElementById("ranks").value.trim()
      ? `${events.toLocaleString("en")} rows` : "";
    changed();
  }

  // --------------------------------------------------------------------------------------------------------- memory

  let memory = null;
  function drawMemory() {
    if (!memory) return;
    const { canvas, levels, of } = memory, ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    const width = canvas.width = Math.round(canvas.clientWidth * ratio), height = canvas.height = Math.round(canvas.clientHeight * ratio);
    const left = LABEL * ratio, inner = width - left, tall = height - 6 * ratio, rows = of.rows.length;
    context.fillStyle = theme.paper; context.fillRect(0, 0, width, height);
    context.font = `${10 * ratio}px ui-monospace, Menlo, Consolas, monospace`; context.textBaseline = "middle"; context.textAlign = "right";
    const partOf = x => Math.floor((view.t0 + x / inner * (view.t1 - view.t0)) / of.end * of.parts);
    if (rows <= 16) {
      context.fillStyle = theme.soft;
      for (const share of [0, .5, 1]) context.fillText(amount(of.top * share), left - 5 * ratio, (1 - share) * (tall - 12 * ratio) + 8 * ratio);
      for (let row = 0; row < rows; row++) {
        context.strokeStyle = memory.colours[of.ranks[row] % memory.colours.length]; context.lineWidth = 1.5 * ratio; context.beginPath();
        for (let x = 0; x < inner; x++) {
          const part = partOf(x);
          if (part < 0 || part >= of.parts) continue;
          context.lineTo(left + x, (1 - levels[row * of.parts + part] / 65535) * (tall - 12 * ratio) + 8 * ratio);
        }
        context.stroke();
      }
      return;
    }
    const image = context.createImageData(inner, tall), pixels = new Uint32Array(image.data.buffer), [r, g, b] = rgb(theme.paper);
    for (let y = 0; y < tall; y++) for (let x = 0; x < inner; x++) {
      const part = partOf(x), row = Math.floor(y / tall * rows);
      const share = part < 0 || part >= of.parts ? 0 : levels[row * of.parts + part] / 65535;
      pixels[y * inner + x] = pixel(r + (160 - r) * share, g + (40 - g) * share, b + (90 - b) * share);
    }
    context.putImageData(image, left, 0);
    context.fillStyle = theme.soft;
    for (const [row, y] of [[0, 6], [rows - 1, tall / ratio - 6]]) context.fillText(of.rows[row].slice(0, 14), left - 5 * ratio, y * ratio);
    context.fillText(`to ${amount(of.top)}`, left - 5 * ratio, tall / 2);
  }
  function amount(value) {
    if (data.memory.unit !== "bytes") return +value.toPrecision(3) + "";
    for (const [factor, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (value >= factor) return +(value / factor).toPrecision(3) + " " + name;
    return Math.round(value) + " B";
  }

  // ----------------------------------------------------------------------------------------------------------- start

  async function begin() {
    if (typeof DecompressionStream === "undefined") throw new Error("this page needs a browser of 2023 or later");
    readTheme();
    const canvases = document.querySelectorAll("canvas.timeline");
    const columns = await Promise.all(data.panels.map(unpack));
    report.panels = data.panels.map((of, k) => new Timeline(of, canvases[k], columns[k]));
    whole = Math.max(...report.panels.map(panel => panel.end), data.memory ? data.memory.end : 0) || 1;
    Object.assign(view, { t0: 0, t1: whole });
    for (const panel of report.panels) { panel.size(); listen(panel); }
    draw(false);
    report.firstPicture = performance.now();
    if (data.memory) {
      memory = { of: data.memory, levels: await column(data.memory.levels), canvas: document.querySelector("canvas.memory"),
        colours: ["#4e79a7", "#e07b16", "#4b9140", "#d6474a", "#4f9d97", "#c9a019", "#a0618f", "#ef6f7f", "#8d6449", "#8f8580"] };
      drawMemory();
    }
    for (const [name, does] of [["closer", () => zoom(.5)], ["farther", () => zoom(2)], ["whole", all]])
      document.getElementById(name)?.addEventListener("click", does);
    document.querySelectorAll(".controls input").forEach(input => input.addEventListener("input", filter));
    const resized = () => { readTheme(); for (const panel of report.panels) panel.size(); draw(true); };
    window.addEventListener("resize", resized);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resized);
    resting = setTimeout(() => draw(true), 50);
    report.ready = true;
  }
  begin().catch(error => {
    report.error = String(error);
    if (status) status.textContent = `the timeline cannot be drawn: ${error.message}`;
    console.error(error);
  });
})();
