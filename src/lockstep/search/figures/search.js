"use strict";
// The trial beside the pointer, and the table's order. The page is whole without it.
(() => {
  const trials = JSON.parse(document.getElementById("data").textContent).trials;
  const grain = 10000, reach = 30;
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.hidden = true;

  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth - 8;
    tip.style.left = Math.max(8, right ? event.clientX - 16 - box.width : event.clientX + 16) + "px";
    tip.style.top = Math.max(8, Math.min(event.clientY + 16, innerHeight - box.height - 8)) + "px";
  };

  const clear = () => {
    tip.hidden = true;
    document.querySelectorAll(".pointed").forEach((each) => each.classList.remove("pointed"));
  };

  // The segments of a path's `d`, which has absolute points alone: [x, y, x, y] each.
  const segments = (path) =>
    path.getAttribute("d").split("M").slice(1).flatMap((run) => {
      const points = run.split("L").map((point) => point.split(" ").map(Number));
      return points.slice(1).map((point, at) => [...points[at], ...point]);
    });

  const squared = ([x, y, toX, toY], atX, atY, width, height) => {
    const left = (x / grain) * width - atX, up = (y / grain) * height - atY;
    const across = ((toX - x) / grain) * width, along = ((toY - y) / grain) * height;
    const length = across * across + along * along;
    const share = length ? Math.min(1, Math.max(0, -(left * across + up * along) / length)) : 0;
    return (left + share * across) ** 2 + (up + share * along) ** 2;
  };

  document.querySelectorAll(".plot.trials").forEach((plot) => {
    const svg = plot.querySelector("svg");
    let lines = null;
    const over = (event) => {
      lines = lines || [...plot.querySelectorAll("path[data-trial]")].reverse().map((path) => [path.dataset.trial, segments(path)]);
      const box = svg.getBoundingClientRect();
      const atX = event.clientX - box.left, atY = event.clientY - box.top;
      let found = null, closest = reach * reach;
      for (const [trial, parts] of lines) {
        for (const part of parts) {
          const distance = squared(part, atX, atY, box.width, box.height);
          if (distance < closest) [found, closest] = [trial, distance];
        }
      }
      clear();
      if (found === null) return;
      document.querySelectorAll(`path[data-trial="${found}"]`).forEach((path) => {
        path.classList.add("pointed");
        path.closest(".plot").classList.add("pointed");
      });
      tip.textContent = trials[found];
      place(event);
    };
    plot.addEventListener("pointermove", over);
    plot.addEventListener("pointerdown", over);
    plot.addEventListener("pointerleave", clear);
  });

  // A click on a column's head sorts by it, and one more turns the order. What has no value is last.
  document.querySelectorAll("table.all").forEach((table) => {
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const turned = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", turned > 0 ? "ascending" : "descending");
        const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
        const numeric = head.classList.contains("number");
        const compare = ([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : turned * (numeric ? a - b : a.localeCompare(b)));
        rows.sort(compare).forEach(([, row]) => table.tBodies[0].append(row));
      });
    });
  });
})();
