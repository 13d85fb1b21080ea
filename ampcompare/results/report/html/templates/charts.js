// Switches the views of charts and the arms in them, and reads out their values; the page has them drawn.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll('input[name="arm"]')];
  const mostRead = 12; // arms in one readout

  function element(name, attributes, ...children) {
    const made = Object.assign(document.createElement(name), attributes);
    made.append(...children);
    return made;
  }

  function svg(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const positions = (series) => data.positions[series.x];
  const signs = (text) => text.replace("-", "\u2212");

  function shownValue(view, value) {
    const text = view.decimals === null ? String(Number(value.toPrecision(4))) : value.toFixed(view.decimals);
    return signs((view.signed && value > 0 ? "+" : "") + text) + view.unit;
  }

  function nearest(values, wanted) {
    let best = 0;
    values.forEach((value, at) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at; });
    return best;
  }

  function line(one, text) {
    const look = data.arms[one.a];
    const mark = svg("svg", { class: `swatch c${look.color} ${look.dash}`, viewBox: "0 0 28 14" }, svg("path", { class: "dash", d: "M0 7h28" }));
    return element("div", {}, mark, element("span", { textContent: look.name }), element("b", { textContent: text }));
  }

  function attach(chart) {
    const figure = document.querySelector(`[data-figure="${chart.key}"]`);
    const switches = [...document.querySelectorAll(`[data-show="${chart.key}"]`)];
    const logs = [...document.querySelectorAll(`[data-log="${chart.key}"]`)];
    const readout = element("div", { className: "readout", hidden: true });
    readout.setAttribute("role", "status");
    figure.append(readout);
    let [number, cursor] = [0, -1];

    const picture = () => figure.querySelector(".picture:not([hidden])");
    const shown = () => chart.views[number].series.filter((one) => boxes[one.a].checked);
    const columns = () => [...new Set(shown().flatMap(positions))].sort((a, b) => a - b);

    function leave() {
      readout.hidden = true;
      figure.querySelector(".cursor")?.remove();
      cursor = -1;
    }

    // Reads the values at one position of the horizontal axis.
    function read(wanted) {
      const places = columns();
      if (!places.length) return;
      const view = chart.views[number];
      cursor = Math.min(places.length - 1, Math.max(0, wanted));
      const at = places[cursor];
      const close = Math.max((places[places.length - 1] - places[0]) / places.length, 1e-9);
      const rows = [];
      for (const one of shown()) {
        const index = nearest(positions(one), at);
        if (Math.abs(positions(one)[index] - at) <= close) rows.push([one, one.y[index], one.lo && one.lo[index] < one.hi[index] ? [one.lo[index], one.hi[index]] : null]);
      }
      rows.sort((a, b) => b[1] - a[1]);
      const head = element("p", { textContent: `${chart.x} ${signs(at.toLocaleString("en", { maximumSignificantDigits: 4 }))}` });
      const lines = rows.slice(0, mostRead).map(([one, value, range]) => line(one, shownValue(view, value) + (range ? ` (${shownValue(view, range[0])} to ${shownValue(view, range[1])})` : "")));
      if (rows.length > mostRead) lines.push(element("p", { textContent: `and ${rows.length - mostRead} more` }));
      readout.replaceChildren(head, ...lines);
      readout.hidden = false;
      const [low, high] = picture().dataset.ends.split(" ").map(Number);
      const frame = picture().querySelector(".frame");
      const share = (at - low) / (high - low);
      frame.querySelector(".cursor")?.remove();
      frame.append(svg("line", { class: "cursor", x1: `${100 * share}%`, x2: `${100 * share}%`, y2: "100%" }));
      const box = frame.getBoundingClientRect();
      const [whole, room] = [figure.clientWidth, readout.offsetWidth];
      const x = box.left - figure.getBoundingClientRect().left + share * box.width;
      readout.style.left = `${Math.max(0, Math.min(whole - room, x > whole / 2 ? x - room - 12 : x + 12))}px`;
    }

    function follow(event) {
      const box = picture().querySelector(".frame").getBoundingClientRect();
      const [low, high] = picture().dataset.ends.split(" ").map(Number);
      read(nearest(columns(), low + ((event.clientX - box.left) / box.width) * (high - low)));
    }

    function show() {
      leave();
      const log = logs.some((box) => box.checked && Number(box.parentElement.dataset.ofView) === number);
      for (const one of figure.querySelectorAll(".picture")) one.hidden = Number(one.dataset.view) !== number || "log" in one.dataset !== log;
      for (const button of switches) button.setAttribute("aria-pressed", String(Number(button.dataset.view) === number));
      for (const box of logs) box.parentElement.hidden = Number(box.parentElement.dataset.ofView) !== number;
    }

    figure.addEventListener("pointermove", follow);
    figure.addEventListener("pointerdown", follow);
    figure.addEventListener("pointerleave", leave);
    figure.addEventListener("blur", leave);
    figure.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) {
        event.preventDefault();
        read(cursor + step);
      } else if (event.key === "Escape") leave();
    });
    for (const button of switches) button.addEventListener("click", () => { number = Number(button.dataset.view); show(); });
    for (const box of logs) box.addEventListener("change", show);
  }

  function showArms() {
    for (const part of document.querySelectorAll(".plot [data-arm]")) part.classList.toggle("off", !boxes[part.dataset.arm].checked);
    const count = boxes.filter((box) => box.checked).length;
    for (const plot of document.querySelectorAll(".plot")) plot.classList.toggle("crowded", count > 4);
    document.getElementById("count").textContent = `${count} of ${boxes.length}`;
  }

  // An arm that is pointed at stands out in every chart.
  function light(arm) {
    for (const part of document.querySelectorAll(".plot [data-arm]")) part.classList.toggle("dim", arm !== null && part.dataset.arm !== arm);
  }

  for (const box of boxes) {
    box.addEventListener("change", showArms);
    const chip = box.closest(".chip");
    chip.addEventListener("pointerenter", () => light(box.checked ? box.value : null));
    chip.addEventListener("pointerleave", () => light(null));
  }
  for (const button of document.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      const chosen = { all: () => true, none: () => false, first: (index) => data.arms[index].on }[button.dataset.choose];
      boxes.forEach((box, index) => { box.checked = chosen(index); });
      showArms();
    });
  }
  data.charts.forEach(attach);
  showArms();
})();
