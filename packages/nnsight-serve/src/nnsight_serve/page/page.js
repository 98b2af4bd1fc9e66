// The page of a server: its modules, its edits, its load. Whatever a server says is set as text.
import { at, copy, make } from "./dom.js";
import { drawTree, drawHits, locationsOf } from "./tree.js";

const EVERY = 4000; // milliseconds between looks at load and edits
const KEY = "nnsight-key";

class Refused extends Error {}
class Failed extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  let headers = {};
  try {
    headers = key === null ? {} : new Headers({ Authorization: `Bearer ${key}` });
  } catch {
    throw new Refused(); // no key has such letters
  }
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new Refused();
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Failed(said.error?.message ?? `The server answers ${path} with ${answer.status}.`);
  }
  return answer.json();
}

function state(text, kind = "") {
  at("state").textContent = text;
  at("state").className = `state ${kind}`;
}

function fail(error) {
  state(error instanceof Failed ? error.message : "The server does not answer.", "gone");
}

function shut() {
  at("inside").hidden = true;
  at("door").hidden = false;
  at("wrong").textContent = sessionStorage.getItem(KEY) === null ? "" : "This server does not know that key.";
  sessionStorage.removeItem(KEY);
  state("A key is needed");
  at("key").focus();
}

at("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  start();
});

async function start() {
  try {
    show(await ask("v1/model"));
  } catch (error) {
    if (error instanceof Refused) return shut();
    fail(error);
    return setTimeout(start, EVERY);
  }
  at("door").hidden = true;
  at("inside").hidden = false;
  look();
}

async function look() {
  if (!document.hidden) {
    try {
      const [load, { edits }] = await Promise.all([ask("v1/load"), ask("v1/edits")]);
      showLoad(load);
      showEdits(edits);
      state("Serving", "well");
    } catch (error) {
      if (error instanceof Refused) return shut();
      fail(error);
    }
  }
  setTimeout(look, EVERY);
}

function show({ tree, protocol }) {
  const name = tree.model.split("/").filter(Boolean).at(-1) ?? tree.model;
  document.title = `${name} · nnsight-serve`;
  at("model").textContent = name;
  at("about").textContent = `${tree.model === name ? "" : `${tree.model} · `}${tree.engine} · protocol ${protocol}`;
  at("taps").textContent = tree.compiled
    ? `A tap is reached in compiled steps (${tree.taps.length} here); a block that wants another location makes those steps run eagerly.`
    : "This engine runs without compiled steps, so every location costs the same to reach.";
  const locations = locationsOf(tree);
  drawTree(at("tree"), tree, locations);
  at("search").oninput = () => search(tree, locations);
  search(tree, locations);
  snippets(tree, locations);
}

function search(tree, locations) {
  const text = at("search").value.trim();
  at("tree").hidden = text !== "";
  at("hits").hidden = text === "";
  at("found").textContent = text === "" ? "" : drawHits(at("hits"), text, locations);
}

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${number.format(count)} ${units[unit]}`;
}

function showLoad(load) {
  const shown = {
    "Running requests": number.format(load.requests),
    "Blocks in the engine": number.format(load.blocks),
    "Installed edits": number.format(load.edits),
    "Kept values": bytes(load.kept_bytes),
    "Tensors sent along": bytes(load.outside_bytes),
  };
  at("load").replaceChildren(
    ...Object.entries(shown).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
}

function ago(seconds) {
  const [size, unit] = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]].find(
    ([size]) => Math.abs(seconds) >= size,
  ) ?? [1, "second"];
  return new Intl.RelativeTimeFormat("en", { numeric: "auto" }).format(-Math.trunc(seconds / size), unit);
}

function time(moment) {
  if (moment === null) return "—";
  const date = new Date(moment * 1000);
  return make("time", { datetime: date.toISOString(), title: date.toLocaleString() }, ago(Date.now() / 1000 - moment));
}

function took(seconds) {
  return seconds < 1 ? `${number.format(seconds * 1000)} ms` : `${number.format(seconds)} s`;
}

function showEdits(edits) {
  at("no-edits").hidden = edits.length > 0;
  at("edits").hidden = edits.length === 0;
  const heads = [...at("edits").querySelectorAll("th")].map((head) => head.textContent);
  const rows = edits.map((edit) => {
    const cells = [
      make("span", {}, make("b", {}, edit.name ?? edit.id), make("span", { class: "under" }, edit.way || edit.id)),
      edit.owner || "—",
      time(edit.since),
      time(edit.until),
      `${number.format(edit.share * 100)} %`,
      number.format(edit.requests),
      took(edit.seconds),
      number.format(edit.errors),
    ].map((inside, index) => {
      const cell = make("td", { "data-label": heads[index] }, inside);
      if (index > 3) cell.classList.add("number");
      return cell;
    });
    if (edit.errors > 0) cells.at(-1).classList.add("bad");
    return make("tr", { "data-edit": edit.id }, ...cells);
  });
  at("edits").tBodies[0].replaceChildren(...rows);
}

function snippets(tree, locations) {
  const address = location.href.replace(/[?#].*$/, "").replace(/\/$/, "");
  const text = (value) => JSON.stringify(value);
  const keyed = sessionStorage.getItem(KEY) !== null;
  const places = locations.filter((each) => each.side === "output" && each.tensors.length);
  const taps = places.filter((each) => each.tap);
  const layers = places.filter((each) => /(^|\.)\d+$/.test(each.path));
  const some = [taps, layers, places].find((each) => each.length) ?? [];
  const middle = some[Math.floor((some.length - 1) / 2)];
  code("trace", `from nnsight_client import VLLM

model = VLLM(${text(tree.model)}, serve=${text(address)}${keyed ? ", api_key=KEY" : ""})

with model.trace("The Eiffel Tower is in the city of", max_tokens=1):
    hidden = ${middle ? middle.place : "model.logits"}.save()
    logits = model.logits.save()
`);
  code("openai", `from openai import OpenAI

client = OpenAI(base_url=${text(`${address}/v1`)}, api_key=${keyed ? "KEY" : text("none")})
model = client.models.list().data[0].id
answer = client.completions.create(model=model, prompt="The Eiffel Tower is in the city of")
`);
}

function code(id, text) {
  at(id).textContent = text;
  at(id).parentElement.querySelector(".copy")?.remove();
  const button = make("button", { type: "button", class: "copy" }, "Copy");
  button.setAttribute("aria-label", `Copy: ${at(id).getAttribute("aria-label")}`);
  button.addEventListener("click", () => copy(text));
  at(id).after(button);
}

start();
