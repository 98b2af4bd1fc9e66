// The tree of modules: drawn as it is opened, layers that look alike as one row until then.
import { copy, make } from "./dom.js";

const MOST = 100; // hits that are drawn

// How a block writes a location: model.layers[3].mlp.output
function placeOf(path, side) {
  const parts = path === "" ? [] : path.split(".");
  const steps = parts.map((part) => (/^\d+$/.test(part) ? `[${part}]` : `.${part}`));
  return `model${steps.join("")}.${side}`;
}

export function locationsOf(tree) {
  const taps = new Set(tree.taps);
  const found = [];
  for (const [path, info] of Object.entries(tree.modules)) {
    if (info.same_as != null) continue;
    for (const side of ["output", "input"]) {
      const tensors = info[side];
      if (!tensors) continue;
      const name = path === "" ? side : `${path}.${side}`;
      found.push({ path, side, cls: info.cls, place: placeOf(path, side), tap: taps.has(name), tensors });
    }
  }
  return found;
}

function shapeOf({ at, dtype, shape }) {
  return `${at ? `${at} ` : ""}${dtype} ${shape.length ? shape.join(" × ") : "scalar"}`;
}

function locationRow({ place, tap, tensors, cls }, label, shown) {
  const button = make("button", { type: "button", class: "place", "aria-label": `Copy ${place}` });
  // On a narrow screen it breaks before a dot, if it must.
  label.split(/(?=\.)/).forEach((part, index) => button.append(...(index ? [make("wbr"), part] : [part])));
  button.addEventListener("click", () => copy(place));
  const row = make("div", { class: "row" }, button);
  if (tap) row.append(make("span", { class: "tap", title: "Reached in compiled steps" }, "tap"));
  row.append(make("span", { class: "shape" }, tensors.map(shapeOf).join(", ")));
  if (shown) row.append(make("span", { class: "class" }, cls));
  return make("li", {}, row);
}

// A row whose inside is drawn when it is first opened.
function folded(name, about, fill, open = false) {
  const toggle = make("button", { type: "button", class: "toggle", "aria-expanded": "false" });
  toggle.append(make("span", { class: "mono" }, name), make("span", { class: "class" }, about));
  const inside = make("ul", { hidden: "" });
  const item = make("li", {}, make("div", { class: "row" }, toggle), inside);
  const turn = () => {
    if (!inside.hasChildNodes()) fill(inside);
    inside.hidden = !inside.hidden;
    toggle.setAttribute("aria-expanded", String(!inside.hidden));
  };
  toggle.addEventListener("click", turn);
  if (open) turn();
  return item;
}

export function drawTree(list, tree, locations) {
  const byPath = Map.groupBy ? Map.groupBy(locations, (each) => each.path) : group(locations);
  const looks = new Map();

  const inner = (path, child) => (path === "" ? child : `${path}.${child}`);

  // The same text for two modules that look alike, such as two layers.
  function look(path) {
    if (!looks.has(path)) {
      const info = tree.modules[path];
      const own = [info.cls, info.output, info.input, info.operations];
      const children = info.children.map((child) => [child, look(inner(path, child))]);
      looks.set(path, JSON.stringify([own, children]));
    }
    return looks.get(path);
  }

  function fillModule(into, path) {
    const info = tree.modules[path];
    for (const each of byPath.get(path) ?? []) into.append(locationRow(each, `.${each.side}`));
    const operations = info.output ? (info.operations ?? []) : [];
    if (operations.length && path !== "") {
      into.append(folded(".source", `${operations.length} operations inside its forward`, (list) => {
        for (const name of operations) {
          const place = placeOf(path, `source.${name}.output`);
          list.append(locationRow({ place, tensors: [] }, `.${name}`));
        }
      }));
    }
    fillChildren(into, path, info.children);
    if (!into.hasChildNodes()) into.append(make("li", { class: "quiet" }, "It never runs as a module, so it has no locations."));
  }

  function fillChildren(into, path, children) {
    for (let first = 0; first < children.length; ) {
      let last = first;
      const like = look(inner(path, children[first]));
      const numbered = (index) => /^\d+$/.test(children[index] ?? "");
      while (numbered(first) && numbered(last + 1) && look(inner(path, children[last + 1])) === like) last++;
      const some = children.slice(first, last + 1);
      into.append(some.length > 2 ? manyRow(path, some) : single(path, some[0]));
      first = some.length > 2 ? last + 1 : first + 1;
    }
  }

  function manyRow(path, some) {
    const about = `${some.length} × ${tree.modules[inner(path, some[0])].cls}, all alike`;
    return folded(`${some[0]} – ${some.at(-1)}`, about, (list) => {
      for (const child of some) list.append(single(path, child));
    });
  }

  function single(path, child) {
    const at = inner(path, child);
    const info = tree.modules[at];
    if (info.same_as != null) {
      const about = `${info.cls}, the same module as ${info.same_as}`;
      return make("li", {}, make("div", { class: "row" }, make("span", { class: "mono" }, child), make("span", { class: "class" }, about)));
    }
    return folded(child, info.cls, (list) => fillModule(list, at));
  }

  const root = tree.modules[""];
  const engine = [
    { place: "model.logits", tensors: [] },
    { place: "model.samples", tensors: [] },
    { place: "tracer.result", tensors: [] },
  ];
  list.replaceChildren(
    folded("model", root?.cls ?? "", (inside) => {
      if (root) fillModule(inside, "");
      for (const each of engine) inside.append(locationRow(each, each.place.replace(/^model/, "")));
    }, true),
  );
}

function group(locations) {
  const found = new Map();
  for (const each of locations) found.set(each.path, [...(found.get(each.path) ?? []), each]);
  return found;
}

// Those that hold every word, in the tree's order; what is said of them is returned.
export function drawHits(list, text, locations) {
  const words = text.toLowerCase().split(/\s+/);
  const hits = locations.filter((each) => {
    const all = `${each.path}.${each.side} ${each.place} ${each.cls} ${each.tap ? "tap" : ""}`.toLowerCase();
    return words.every((word) => all.includes(word));
  });
  list.replaceChildren(...hits.slice(0, MOST).map((each) => locationRow(each, each.place, true)));
  if (hits.length === 0) return "No location is called so.";
  const count = hits.length === 1 ? "1 location" : `${hits.length.toLocaleString("en")} locations`;
  return hits.length > MOST ? `${count}; the first ${MOST} are shown.` : count;
}
