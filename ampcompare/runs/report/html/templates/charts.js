// Draws the charts as SVG in the width that they have, reads out their values, and lets boxes switch arms on and off.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll('input[name="arm"]')];
  const narrow = window.matchMedia("(max-width: 700px)");
  const mostRead = 12; // arms in one readout
  const state = new Map();

  function svg(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const positions = (series) => data.positions[series.x];
  const superscript = (number) => [...String(number)].map((char) => "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"["-0123456789".indexOf(char)]).join("");
  const signs = (text) => text.replace("-", "\u2212");

  function shownValue(view, value) {
    const text = view.decimals === null ? String(Number(value.toPrecision(4))) : value.toFixed(view.decimals);
    return signs((view.signed && value > 0 ? "+" : "") + text) + view.unit;
  }

  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999);
  }

  // An axis: where values stand in pixels, and which of them have a label.
  function linear(low, high, start, end, count, whole, signed = false) {
    const step = Math.max(niceStep((high - low) / count), whole ? 1 : 0);
    const first = Math.ceil(low / step - 1e-9);
    const number = Math.max(0, Math.floor(high / step + 1e-9) - first + 1);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) + (/^2\.5/.test(step.toExponential()) && step < 10 ? 1 : 0);
    const ticks = Array.from({ length: number }, (_, at) => (first + at) * step);
    const text = (value) => (signed && value > 0 ? "+" : "") + (Math.abs(value) >= 1e6 ? value.toExponential(1) : value.toLocaleString("en", { minimumFractionDigits: Math.min(digits, 8), maximumFractionDigits: Math.min(digits, 8) }));
    return { at: (value) => start + ((value - low) / (high - low)) * (end - start), ticks: ticks.map((value) => [value, signs(text(value))]) };
  }

  function logarithmic(low, high, start, end, base) {
    const power = (value) => Math.log(value) / Math.log(base);
    const [from, to] = [power(low), power(high)];
    const pad = Math.max(0.04 * (to - from), base === 2 ? 0.6 : 0.05);
    const [first, last] = [Math.ceil(from - pad - 1e-9), Math.floor(to + pad + 1e-9)];
    const every = Math.max(1, Math.ceil((last - first) / 7));
    const ticks = [];
    for (let exponent = first; exponent <= last; exponent += every) ticks.push([base ** exponent, `${base}${superscript(exponent)}`]);
    if (base === 10 && ticks.length < 3) { // less than two decades
      const round = [1, 2, 5].flatMap((factor) => [-1, 0, 1].map((more) => factor * 10 ** (Math.floor(from - pad) + 1 + more)));
      const inside = round.filter((value) => power(value) >= from - pad && power(value) <= to + pad);
      ticks.splice(0, ticks.length, ...inside.map((value) => [value, String(Number(value.toPrecision(1)))]));
    }
    const at = (value) => start + ((power(value) - from + pad) / (to - from + 2 * pad)) * (end - start);
    return { at: (value) => (value > 0 ? at(value) : start), ticks };
  }

  const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  function stairs(points) {
    return points.flatMap(([x, y], at) => (at ? [[x, points[at - 1][1]], [x, y]] : [[x, y]]));
  }

  function extent(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return [low, high];
  }

  // Arms that no arm shown beats in both time and accuracy, from the fastest to the best.
  function frontier(series, better) {
    const sign = better === "lower" ? -1 : 1;
    const points = series.map((one) => [positions(one)[0], one.y[0]]).sort((a, b) => a[0] - b[0] || sign * (b[1] - a[1]));
    const kept = [];
    for (const point of points) if (!kept.length || sign * (point[1] - kept[kept.length - 1][1]) > 0) kept.push(point);
    return kept.flatMap((point, at) => (at ? [[point[0], kept[at - 1][1]], point] : [point]));
  }

  function frame(chart, view, shown, log, width, height) {
    const fitted = shown.some((one) => !one.out) ? shown.filter((one) => !one.out) : shown;
    const usable = (values) => (log ? values.filter((value) => value > 0) : values);
    const ys = usable([...fitted.flatMap((one) => [...one.y, ...(one.lo || []), ...(one.hi || []), ...(one.yr || [])]), ...view.rules, ...(view.signed ? [0] : [])]);
    const xs = shown.flatMap((one) => [...positions(one), ...(one.xr || [])]);
    let [low, high] = ys.length ? extent(ys) : [0, 1];
    let [left, right] = xs.length ? extent(xs) : [0, 1];
    if (!log) {
      const pad = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
      [low, high] = [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
    }
    if (chart.frontier || left === right) {
      const pad = 0.06 * (right - left) || 0.5;
      [left, right] = [left - pad, right + pad];
    }
    const [top, bottom] = [12, height - 24];
    const y = log ? logarithmic(low, high, bottom, top, view.log === "always" ? 2 : 10) : linear(low, high, bottom, top, 5, view.whole, view.signed);
    const label = Math.max(0, ...y.ticks.map(([, text]) => text.length));
    const start = 10 + 6.6 * label;
    return { x: linear(left, right, start, width - 10, narrow.matches ? 4 : 7, chart.whole), y, start, top, bottom, width };
  }

  function drawSeries(view, one, { x, y }, clip) {
    const look = data.arms[one.a];
    const group = svg("g", { class: `arm c${look.color}`, "data-arm": one.a });
    const at = (values) => {
      const points = values.map((value, index) => [x.at(positions(one)[index]), y.at(value)]);
      return one.step ? stairs(points) : points;
    };
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    if (one.lo) inside.append(svg("path", { class: "band", d: `${path([...at(one.hi), ...at(one.lo).reverse()])}Z` }));
    if (one.y.length > 1) inside.append(svg("path", { class: `line ${look.dash}`, d: path(at(one.y)) }));
    if (one.dots && one.y.length > 1) {
      one.y.forEach((value, index) => inside.append(svg("circle", { class: "dot", cx: x.at(positions(one)[index]).toFixed(1), cy: y.at(value).toFixed(1), r: 2.6 })));
    }
    group.append(inside);
    if (one.y.length === 1) {
      const [px, py] = [x.at(positions(one)[0]), y.at(one.y[0])];
      if (one.xr) group.append(svg("path", { class: "range", d: `M${x.at(one.xr[0])} ${py}H${x.at(one.xr[1])}` }));
      if (one.yr) group.append(svg("path", { class: "range", d: `M${px} ${y.at(one.yr[0])}V${y.at(one.yr[1])}` }));
      group.append(svg("path", { class: `symbol ${look.open ? "open" : "full"}`, d: look.shape, transform: `translate(${px - 14} ${py - 7})` }));
    }
    return group;
  }

  function draw(chart) {
    const figure = document.querySelector(`[data-figure="${chart.key}"]`);
    const { view: number, log: wanted } = state.get(chart.key);
    const view = chart.views[number];
    const width = figure.clientWidth;
    if (!width) return; // in a closed part of the page
    const height = narrow.matches ? 230 : 280;
    const shown = view.series.filter((one) => boxes[one.a].checked);
    const log = view.log === "always" || (view.log === "can" && wanted);
    const axes = frame(chart, view, shown, log, width, height);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: shown.length > 4 ? "crowded" : "", "aria-hidden": "true" });
    const clip = `clip-${chart.key}`;
    picture.append(svg("clipPath", { id: clip }, svg("rect", { x: axes.start - 4, y: axes.top - 4, width: width - axes.start, height: axes.bottom - axes.top + 8 })));
    for (const [value, text] of axes.y.ticks) {
      const y = axes.y.at(value);
      picture.append(svg("path", { class: view.signed && value === 0 ? "zero" : "grid", d: `M${axes.start} ${y}H${width - 10}` }));
      picture.append(svg("text", { class: "tick", x: axes.start - 7, y: y + 4, "text-anchor": "end" }, text));
    }
    for (const [value, text] of axes.x.ticks) {
      picture.append(svg("text", { class: "tick", x: axes.x.at(value), y: height - 6, "text-anchor": "middle" }, text));
    }
    for (const rule of view.rules) picture.append(svg("path", { class: "rule", d: `M${axes.start} ${axes.y.at(rule)}H${width - 10}` }));
    if (chart.frontier) picture.append(svg("path", { class: "rule", d: path(frontier(shown, chart.frontier).map(([x, y]) => [axes.x.at(x), axes.y.at(y)])) }));
    for (const one of shown) picture.append(drawSeries(view, one, axes, clip));
    for (const stop of view.stops.filter((one) => boxes[one.a].checked)) {
      stop.x.forEach((x, at) => {
        const y = Math.min(axes.bottom, Math.max(axes.top, axes.y.at(stop.y[at])));
        const cross = svg("path", { class: `stop c${data.arms[stop.a].color}`, "data-arm": stop.a, d: `M${axes.x.at(x) - 5} ${y - 5}l10 10m0 -10l-10 10` });
        cross.append(svg("title", {}, stop.text[at]));
        picture.append(cross);
      });
    }
    const label = document.createElement("p");
    label.className = "axes";
    label.append(Object.assign(document.createElement("span"), { textContent: view.y }), Object.assign(document.createElement("span"), { textContent: chart.x }));
    const readout = Object.assign(document.createElement("div"), { className: "readout", hidden: true });
    readout.setAttribute("role", "status");
    figure.replaceChildren(label, picture, readout);
    Object.assign(state.get(chart.key), { axes, shown, readout, picture, width, cursor: -1, columns: [...new Set(shown.flatMap(positions))].sort((a, b) => a - b) });
  }

  function line(one, text) {
    const row = document.createElement("div");
    const look = data.arms[one.a];
    const mark = svg("svg", { class: `swatch c${look.color} ${look.dash}`, viewBox: "0 0 28 14" }, svg("path", { class: "dash", d: "M0 7h28" }));
    row.append(mark, Object.assign(document.createElement("span"), { textContent: look.name }), Object.assign(document.createElement("b"), { textContent: text }));
    return row;
  }

  function nearest(values, wanted) {
    let best = 0;
    values.forEach((value, at) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at; });
    return best;
  }

  // Reads the values at one position of the horizontal axis.
  function read(chart, cursor) {
    const now = state.get(chart.key);
    if (!now.columns || !now.columns.length) return;
    const view = chart.views[now.view];
    now.cursor = Math.min(now.columns.length - 1, Math.max(0, cursor));
    const at = now.columns[now.cursor];
    const [first, last] = [now.columns[0], now.columns[now.columns.length - 1]];
    const close = Math.max((last - first) / now.columns.length, 1e-9);
    const rows = [];
    for (const one of now.shown) {
      const index = nearest(positions(one), at);
      if (Math.abs(positions(one)[index] - at) <= close) rows.push([one, one.y[index], one.lo && one.lo[index] < one.hi[index] ? [one.lo[index], one.hi[index]] : null]);
    }
    rows.sort((a, b) => b[1] - a[1]);
    const head = Object.assign(document.createElement("p"), { textContent: `${chart.x} ${signs(at.toLocaleString("en", { maximumSignificantDigits: 4 }))}` });
    const lines = rows.slice(0, mostRead).map(([one, value, range]) => line(one, shownValue(view, value) + (range ? ` (${shownValue(view, range[0])} to ${shownValue(view, range[1])})` : "")));
    if (rows.length > mostRead) lines.push(Object.assign(document.createElement("p"), { textContent: `and ${rows.length - mostRead} more` }));
    now.readout.replaceChildren(head, ...lines);
    now.readout.hidden = false;
    const x = now.axes.x.at(at);
    const room = now.readout.offsetWidth;
    now.readout.style.left = `${Math.max(0, Math.min(now.width - room, x > now.width / 2 ? x - room - 12 : x + 12))}px`;
    now.picture.querySelector(".cursor")?.remove();
    now.picture.append(svg("path", { class: "cursor", d: `M${x} ${now.axes.top}V${now.axes.bottom}` }));
  }

  function leave(chart) {
    const now = state.get(chart.key);
    if (!now.readout) return;
    now.readout.hidden = true;
    now.picture.querySelector(".cursor")?.remove();
    now.cursor = -1;
  }

  function attach(chart) {
    state.set(chart.key, { view: 0, log: false });
    const figure = document.querySelector(`[data-figure="${chart.key}"]`);
    const follow = (event) => {
      const { axes, columns } = state.get(chart.key);
      if (!columns || !columns.length) return;
      const x = event.clientX - figure.getBoundingClientRect().left;
      read(chart, nearest(columns.map(axes.x.at), x));
    };
    figure.addEventListener("pointermove", follow);
    figure.addEventListener("pointerdown", follow);
    figure.addEventListener("pointerleave", () => leave(chart));
    figure.addEventListener("blur", () => leave(chart));
    figure.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) {
        event.preventDefault();
        read(chart, state.get(chart.key).cursor + step);
      } else if (event.key === "Escape") leave(chart);
    });
    new ResizeObserver(() => { if (figure.clientWidth !== state.get(chart.key).width) draw(chart); }).observe(figure);
    for (const button of document.querySelectorAll(`[data-show="${chart.key}"]`)) {
      button.addEventListener("click", () => {
        state.get(chart.key).view = Number(button.dataset.view);
        for (const other of document.querySelectorAll(`[data-show="${chart.key}"]`)) other.setAttribute("aria-pressed", String(other === button));
        for (const label of figure.parentElement.querySelectorAll("[data-of-view]")) label.hidden = label.dataset.ofView !== button.dataset.view;
        draw(chart);
      });
    }
    const box = document.querySelector(`[data-log="${chart.key}"]`);
    if (box) box.addEventListener("change", () => { state.get(chart.key).log = box.checked; draw(chart); });
  }

  function drawAll() {
    data.charts.forEach(draw);
    const count = document.getElementById("count");
    if (count) count.textContent = `${boxes.filter((box) => box.checked).length} of ${boxes.length}`;
  }

  // An arm that is pointed at stands out in every chart.
  function light(arm) {
    for (const part of document.querySelectorAll(".plot [data-arm]")) part.classList.toggle("dim", arm !== null && part.dataset.arm !== arm);
  }

  for (const box of boxes) {
    box.addEventListener("change", drawAll);
    const chip = box.closest(".chip");
    chip.addEventListener("pointerenter", () => light(box.checked ? box.value : null));
    chip.addEventListener("pointerleave", () => light(null));
  }
  for (const button of document.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      const chosen = { all: () => true, none: () => false, first: (index) => data.arms[index].on }[button.dataset.choose];
      boxes.forEach((box, index) => { box.checked = chosen(index); });
      drawAll();
    });
  }
  data.charts.forEach(attach);
  drawAll();
})();
