// The panel that says how a further box joins, with a code that lasts some minutes.

import * as api from "../support/api.js";
import { byId, setOptional, setText } from "../support/dom.js";

export class Join {
  address = null; // at which boxes join; null: the service does not listen for them
  #isOpen = false;
  #code = null;

  constructor() {
    const open = document.getElementById("join-open");
    open?.addEventListener("click", () => (this.#isOpen ? this.close() : this.#open()));
    byId("join-close").addEventListener("click", () => {
      this.close();
      open?.focus();
    });
    byId("join-again").addEventListener("click", () => this.#makeCode());
    setInterval(() => this.#isOpen && this.render(), 1000);
  }

  /** Hides the panel, and forgets its code, which stays valid. */
  close() {
    this.#isOpen = false;
    this.#code = null;
    setText(byId("join-commands"), "");
    setOptional(byId("join-error"), null);
    this.render();
  }

  render() {
    byId("join").hidden = !this.#isOpen;
    document.getElementById("join-open")?.setAttribute("aria-expanded", String(this.#isOpen));
    if (!this.#isOpen) return;
    byId("join-closed").hidden = this.address !== null;
    byId("join-open-code").hidden = this.#code === null;
    if (this.#code === null) return;
    const leftS = this.#code.expires_at - Date.now() / 1000;
    byId("join-again").hidden = leftS > 0;
    setText(byId("join-left"), leftS > 0 ? `The code is for one box. ${leftOf(leftS)}` : "The code has expired.");
  }

  async #open() {
    this.#isOpen = true;
    if (this.address !== null) await this.#makeCode();
    this.render();
    byId("join-title").focus();
  }

  async #makeCode() {
    setOptional(byId("join-error"), null);
    try {
      const code = await api.makeJoinCode();
      if (!this.#isOpen) return;
      this.#code = code;
      setText(byId("join-commands"), code.commands.join("\n"));
    } catch (error) {
      const problem = error instanceof api.Refusal ? error.message : "The service did not answer; try again.";
      setOptional(byId("join-error"), problem);
    }
    byId("join-again").hidden = this.#code !== null;
    this.render();
  }
}

function leftOf(seconds) {
  const minutes = Math.ceil(seconds / 60);
  return `It expires in ${minutes === 1 ? "less than a minute" : `${minutes} minutes`}.`;
}
