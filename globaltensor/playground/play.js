// The controls of the playground: what is set becomes a query, and what the server tells is shown.
"use strict";
(() => {
  const setting = JSON.parse(document.getElementById("setting").textContent);
  const play = window.play = { shown: 0, setting };
  const result = document.getElementById("result"), names = ["dp", "tp"];
  let asked = 0, waiting = 0;

  function button(text, pressed, click) {
    const element = document.createElement("button");
    element.type = "button"; element.textContent = text; element.setAttribute("aria-pressed", pressed);
    element.addEventListener("click", () => { click(); build(); show(); });
    return element;
  }

  function line(parent, text, ...elements) {
    const row = document.createElement("div");
    row.className = "choice"; row.append(text + " ", ...elements);
    parent.append(row);
  }

  function build() {
    const axes = document.getElementById("axes"), called = names.slice(0, setting.axes.length);
    axes.replaceChildren(axes.firstElementChild);
    setting.axes.forEach((n, k) => line(axes, called[k], button("-", false, () => { setting.axes[k] = Math.max(1, n - 1); }),
      String(n), button("+", false, () => { if (ranks() / n * (n + 1) <= setting.most) setting.axes[k] = n + 1; })));
    line(axes, "axes", button("1", setting.axes.length === 1, () => resize(1)), button("2", setting.axes.length === 2, () => resize(2)));
    for (const name of ["x", "y"]) {
      const field = document.getElementById(name), dims = sizes(setting[name + "_shape"]).length;
      field.querySelectorAll(".choice").forEach(row => row.remove());
      const choices = ["B", "P", ...Array.from({ length: dims }, (_, d) => `S(${d})`)];
      setting.axes.forEach((_, k) => line(field, called[k], ...choices.map(sbp =>
        button(sbp, setting[name + "_sbp"][k] === sbp, () => { setting[name + "_sbp"][k] = sbp; }))));
    }
  }

  const ranks = () => setting.axes.reduce((a, b) => a * b, 1);
  const sizes = text => text.split(/[ ,]+/).filter(Boolean);
  function resize(axes) {
    setting.axes = axes === 1 ? [Math.min(ranks(), setting.most)] : [2, 2];
    for (const name of ["x", "y"]) setting[name + "_sbp"] = setting.axes.map((_, k) => setting[name + "_sbp"][k] || "B");
  }

  async function show() {
    const number = ++asked, query = new URLSearchParams({ axes: setting.axes.join(","), expression: setting.expression,
      x_shape: setting.x_shape, y_shape: setting.y_shape, x_sbp: setting.x_sbp.join(" "), y_sbp: setting.y_sbp.join(" ") });
    try {
      const reply = await fetch("show?" + query), html = await reply.text();
      if (number === asked) { result.innerHTML = html; play.shown = number; }
    } catch {
      if (number === asked) result.textContent = "The server does not answer: start globaltensor play again.";
    }
  }

  function fill() {
    for (const name of ["expression", "x_shape", "y_shape"]) document.getElementById(name).value = setting[name];
    build();
  }
  for (const name of ["expression", "x_shape", "y_shape"])
    document.getElementById(name).addEventListener("input", event => {
      setting[name] = event.target.value;
      if (name !== "expression") build();
      clearTimeout(waiting); waiting = setTimeout(show, 250);
    });
  document.getElementById("examples").addEventListener("change", event => {
    Object.assign(setting, structuredClone(setting.examples[event.target.value])); fill(); show();
  });
  fill();
  show();
})();
