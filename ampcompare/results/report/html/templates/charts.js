// Switches the views of charts and the arms in them, and shows the values below the pointer; the page has them drawn.
(function () {
  "use strict";
  document.documentElement.classList.add("js");
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll('input[name="arm"]')];
  const mostRead = 12; // arms in one readout

  function element(name, className, ...children) {
    const made = Object.assign(document.createElement(name), { className });
    made.append(...children);
    return made;
  }

  const signs = (text) => text.replace("-", "\u2212");

  function shownValue(view, value) {
    const text = view.decimals === null ? String(Number(value.toPrecision(4))) : value.toFixed(view.decimals);
    return signs((view.signed && value > 0 ? "+" : "") + text) + view.unit;
  }

  function nearest(values, wanted) {
    return values.reduce((best, value, at) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? at : best), 0);
  }

  function attach(chart) {
    const figure = document.querySelector(`[data-figure="${chart.key}"]`);
    const pictures = [...figure.querySelectorAll(".picture")];
    const switches = [...document.querySelectorAll(`[data-show="${chart.key}"]`)];
    const readout = element("div", "readout");
    readout.hidden = true;
    figure.append(readout);
    let number = 0;

    // The values of each arm at its point that is nearest to the pointer, where it has one about there.
    figure.addEventListener("pointermove", (event) => {
      const [view, box] = [chart.views[number], pictures[number].querySelector(".frame").getBoundingClientRect()];
      const [low, high] = pictures[number].dataset.ends.split(" ").map(Number);
      const wanted = low + ((event.clientX - box.left) / box.width) * (high - low);
      const shown = view.series.filter((one) => boxes[one.a].checked);
      const places = shown.flatMap((one) => data.positions[one.x]);
      if (!places.length) return;
      const at = places[nearest(places, wanted)];
      const rows = [];
      for (const one of shown) {
        const xs = data.positions[one.x];
        const index = nearest(xs, at);
        if (Math.abs(xs[index] - at) <= (high - low) / xs.length) rows.push([one, index]);
      }
      rows.sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
      const lines = rows.slice(0, mostRead).map(([one, index]) => {
        const [low, high] = one.lo ? [one.lo[index], one.hi[index]] : [0, 0];
        const range = low < high ? ` (${shownValue(view, low)} to ${shownValue(view, high)})` : "";
        const look = data.arms[one.a];
        return element("div", `c${look.color}`, element("span", "", look.name), element("b", "", shownValue(view, one.y[index]) + range));
      });
      if (rows.length > mostRead) lines.push(element("p", "", `and ${rows.length - mostRead} more`));
      const head = `${chart.x} ${signs(at.toLocaleString("en", { maximumSignificantDigits: 4 }))}`;
      readout.replaceChildren(element("p", "", head), ...lines);
      readout.hidden = false;
      const x = event.clientX - figure.getBoundingClientRect().left;
      readout.style.left = `${Math.max(0, x > figure.clientWidth / 2 ? x - readout.offsetWidth - 12 : x + 12)}px`;
    });
    figure.addEventListener("pointerleave", () => { readout.hidden = true; });

    switches.forEach((button, view) => button.addEventListener("click", () => {
      number = view;
      pictures.forEach((one, at) => { one.hidden = at !== view; });
      switches.forEach((one, at) => one.setAttribute("aria-pressed", String(at === view)));
    }));
  }

  function showArms() {
    for (const part of document.querySelectorAll(".plot [data-arm]")) part.classList.toggle("off", !boxes[part.dataset.arm].checked);
  }

  for (const box of boxes) box.addEventListener("change", showArms);
  for (const button of document.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = button.dataset.choose === "all";
      showArms();
    });
  }
  data.charts.forEach(attach);
  showArms();
})();
