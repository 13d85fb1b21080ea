// Colors, sorting and copying: what every page has.
(function () {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");

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
  setTheme(saved);
  for (const radio of document.querySelectorAll('input[name="theme"]')) {
    radio.checked = radio.value === (saved || "auto");
    radio.addEventListener("change", () => {
      setTheme(radio.value);
      try {
        window.localStorage.setItem("ampcompare-theme", radio.value);
      } catch {
        // the choice then lasts as long as the page
      }
    });
  }

  // A cell counts by the number that it begins with; words follow numbers, and a dash is always last.
  function sortKey(row, column) {
    const text = row.children[column].textContent.trim().replace(/\u2212/g, "-");
    if (text === "-" || text === "") return { rank: 2, value: 0, text };
    const number = /^[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?/i.exec(text);
    return number ? { rank: 0, value: Number(number[0].replace(/,/g, "")), text } : { rank: 1, value: 0, text };
  }

  const states = ["none", "ascending", "descending"];
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const heads = [...table.tHead.rows[0].querySelectorAll("th")];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = states[(states.indexOf(head.ariaSort || "none") + 1) % states.length];
        for (const other of heads) other.removeAttribute("aria-sort");
        if (next !== "none") head.ariaSort = next;
        const sign = next === "descending" ? -1 : 1;
        const keyed = original.map((row) => ({ row, key: sortKey(row, column) }));
        if (next !== "none") {
          keyed.sort(({ key: a }, { key: b }) => {
            if (a.rank === 2 || b.rank === 2) return a.rank - b.rank;
            return sign * (a.rank - b.rank || a.value - b.value || a.text.localeCompare(b.text));
          });
        }
        body.append(...keyed.map(({ row }) => row));
      });
    });
  }

  async function copied(text, shown) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      window.getSelection().selectAllChildren(shown); // where scripts may not write the clipboard, the keys can
      return document.execCommand("copy");
    }
  }

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const shown = button.parentElement.querySelector("pre");
      button.textContent = (await copied(shown.textContent, shown)) ? "Copied" : "Press Ctrl+C";
      window.setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
