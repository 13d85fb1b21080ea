// Draws the figures in the present colors, and lets checkboxes switch arms on and off in all of them at once.
(function () {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = Array.from(document.querySelectorAll('input[name="arm"]'));
  const logarithmic = new Set();
  const fewEnough = 12; // arms whose values fit into one hover label
  const narrow = window.matchMedia("(max-width: 700px)");
  const canHover = window.matchMedia("(hover: hover)");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

  const merged = (base, more) => {
    const out = { ...base };
    for (const [name, value] of Object.entries(more || {})) {
      const both = value && out[name] && typeof value === "object" && !Array.isArray(value);
      out[name] = both ? merged(out[name], value) : value;
    }
    return out;
  };

  function theme() {
    const style = getComputedStyle(root);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      ink: color("ink"), quiet: color("quiet"), paper: color("paper"), grid: color("grid"), rule: color("rule"),
      font: getComputedStyle(document.body).fontFamily,
      arms: data.arms.map((arm) => color(`arm-${arm.color}`)),
    };
  }

  const faded = (hex, share) => {
    const part = (at) => parseInt(hex.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
  };

  function dressed(trace, look, on) {
    const { arm, role } = trace.meta;
    const color = look.arms[arm];
    const { dash, symbol } = data.arms[arm];
    const out = { ...trace, visible: on[arm] };
    const label = { hoverlabel: { bordercolor: color } };
    if (role === "line") {
      return { ...out, ...label, line: { color, width: 2, dash }, marker: { color, symbol, size: 7 } };
    }
    if (role === "band") {
      const look = { fill: "toself", fillcolor: faded(color, 0.14), line: { width: 0, color: faded(color, 0) } };
      return { ...out, ...look, mode: "lines", hoverinfo: "skip" };
    }
    if (role === "prediction") return { ...out, ...label, line: { color, width: 2, dash: "dot" } };
    if (role === "pooled") {
      const bars = { ...out.error_x, color, thickness: 3, width: 8 };
      return { ...out, ...label, error_x: bars, marker: { color, symbol: "diamond-wide", size: 16 } };
    }
    if (role === "stop") {
      return { ...out, ...label, marker: { color, symbol: "x", size: 12, line: { color: look.paper, width: 1.5 } } };
    }
    if (role === "box") return { ...out, ...label, line: { color, width: 1.5 }, fillcolor: faded(color, 0.25), width: 0.6 };
    if (role === "bar") {
      const insidetextfont = { color: look.paper };
      return { ...out, ...label, marker: { color }, width: 0.62, textposition: "auto", insidetextfont };
    }
    const bars = { color, thickness: 1.5, width: 5 };
    for (const name of ["error_x", "error_y"]) if (out[name]) out[name] = { ...out[name], ...bars };
    return { ...out, ...label, marker: { color, symbol, size: 12, line: { color: look.paper, width: 1 } } };
  }

  // Arms that no arm shown beats in both time and accuracy, from the fastest to the most accurate.
  function frontier(traces, look) {
    const points = traces.filter((trace) => trace.visible).map((trace) => ({ x: trace.x[0], y: trace.y[0] }));
    points.sort((a, b) => a.x - b.x || b.y - a.y);
    const kept = [];
    for (const point of points) if (!kept.length || point.y > kept[kept.length - 1].y) kept.push(point);
    return {
      type: "scatter", mode: "lines", x: kept.map((point) => point.x), y: kept.map((point) => point.y),
      line: { color: look.quiet, width: 1.5, dash: "dot", shape: "hv" }, hoverinfo: "skip",
    };
  }

  function layout(figure, look, shown) {
    const axis = {
      gridcolor: look.grid, linecolor: look.rule, zeroline: false, zerolinecolor: look.quiet, automargin: true,
      ticks: "", title: { standoff: 8, font: { size: 12.5, color: look.quiet } }, tickfont: { color: look.quiet },
      exponentformat: "power",
    };
    const base = {
      autosize: true, showlegend: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: look.font, size: 12.5, color: look.ink },
      margin: { l: 52, r: 14, t: 10, b: 44 },
      hoverlabel: { bgcolor: look.paper, bordercolor: look.rule, font: { color: look.ink }, namelength: 40 },
      dragmode: canHover.matches ? "zoom" : false, // a finger on a figure scrolls the page
      modebar: { bgcolor: look.paper, color: look.quiet, activecolor: look.ink },
      hovermode: "closest",
      height: narrow.matches ? 280 : 330,
      xaxis: { ...axis }, yaxis: { ...axis },
    };
    const made = merged(base, figure.layout);
    if (made.hovermode === "x unified" && (shown > fewEnough || narrow.matches)) made.hovermode = "closest";
    if (figure.byArm) {
      made.height = Math.max(160, 74 + 30 * shown);
      made.yaxis.showgrid = false;
      made.yaxis.tickfont = { color: look.ink };
      made.margin = { ...made.margin, l: 12 };
    }
    if (logarithmic.has(figure.key)) made.yaxis = { ...made.yaxis, type: "log", dtick: undefined };
    made.shapes = (made.shapes || []).map((shape) => ({ ...shape, line: { color: look.quiet, width: 1.5, dash: "dot" } }));
    return made;
  }

  function draw() {
    const on = boxes.map((box) => box.checked);
    const look = theme();
    for (const figure of data.figures) {
      const place = document.querySelector(`[data-figure="${figure.key}"]`);
      const traces = figure.traces.map((trace) => dressed(trace, look, on));
      traces.forEach((trace, at) => { // a band goes along its line, which comes next, and back again
        if (trace.meta.role === "band") trace.x = [...traces[at + 1].x, ...[...traces[at + 1].x].reverse()];
      });
      const shown = new Set(traces.filter((trace) => trace.visible).map((trace) => trace.meta.arm)).size;
      if (figure.key === "pareto") traces.unshift(frontier(traces, look));
      window.Plotly.react(place, traces, layout(figure, look, shown), {
        responsive: true, displaylogo: false, showSendToCloud: false,
        displayModeBar: canHover.matches ? "hover" : false,
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
        toImageButtonOptions: { filename: figure.key, scale: 2 },
      });
    }
    const count = on.filter(Boolean).length;
    document.getElementById("count").textContent = `${count} of ${on.length}`;
  }

  function remembered() {
    try {
      return window.localStorage.getItem("ampcompare-theme");
    } catch {
      return null; // a browser may keep nothing for files
    }
  }

  function setTheme(name) {
    if (name === "light" || name === "dark") root.dataset.theme = name;
    else delete root.dataset.theme;
  }

  const saved = remembered();
  for (const radio of document.querySelectorAll('input[name="theme"]')) {
    radio.checked = radio.value === (saved || "auto");
    radio.addEventListener("change", () => {
      setTheme(radio.value);
      try {
        window.localStorage.setItem("ampcompare-theme", radio.value);
      } catch {
        // the choice then lasts as long as the page
      }
      draw();
    });
  }
  setTheme(saved);
  for (const box of boxes) box.addEventListener("change", draw);
  for (const button of document.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      const chosen = { all: () => true, none: () => false, first: (place) => data.arms[place].on }[button.dataset.choose];
      boxes.forEach((box, place) => { box.checked = chosen(place); });
      draw();
    });
  }
  for (const box of document.querySelectorAll("[data-log]")) {
    box.addEventListener("change", () => {
      if (box.checked) logarithmic.add(box.dataset.log);
      else logarithmic.delete(box.dataset.log);
      draw();
    });
  }
  for (const query of [narrow, canHover, prefersDark]) query.addEventListener("change", draw);
  draw();
})();
