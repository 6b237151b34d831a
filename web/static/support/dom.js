// The page's elements. Data is only inserted as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** Sets an element's text. An unchanged text keeps the user's selection. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an element's text, and hides the element if there is none. */
export function setOptional(element, text) {
  setText(element, text ?? "");
  element.hidden = !text;
}

export function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

/** Fills a description list with [name, value, tooltip?] entries. It is rebuilt only if its names change. */
export function setPairs(list, pairs) {
  const names = JSON.stringify(pairs.map(([name]) => name));
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(
      ...pairs.map(([name, , tooltip]) => {
        const pair = make("div");
        if (tooltip) pair.title = tooltip;
        pair.append(make("dt", name), make("dd"));
        return pair;
      }),
    );
  }
  pairs.forEach(([, value], index) => setText(list.children[index].lastChild, value));
}

export function setBadge(element, status) {
  setText(element, status.replaceAll("_", " "));
  element.dataset.status = status;
}

/** Makes every button with `data-copy` copy the text of the element that it names. */
export function installCopyButtons() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = byId(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      // No permission, or no secure context: selects the text, so that the user can copy it with the keyboard.
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}
