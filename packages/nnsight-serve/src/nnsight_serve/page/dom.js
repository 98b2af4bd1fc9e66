// Elements and the clipboard.

export const at = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inside);
  return node;
}

let hush;
export async function copy(text) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyAside(text);
  }
  at("said").textContent = done ? `Copied ${text.split("\n")[0]}` : "The browser did not let it be copied.";
  clearTimeout(hush);
  hush = setTimeout(() => (at("said").textContent = ""), 3000);
}

// Over plain HTTP, browsers keep the clipboard from pages that are not on this machine.
function copyAside(text) {
  const focused = document.activeElement;
  const area = make("textarea", { readonly: "", "aria-hidden": "true", class: "aside" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
