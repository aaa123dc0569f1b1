// Search runs in a worker, and browsers start none for a page from disk: there a hidden frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inner) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      this.ready = new Promise((resolve) => {
        inner.document.open();
        inner.document.write("<script>postMessage = (data) => parent.postMessage(data, '*')</" + "script>");
        const script = inner.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        inner.document.body ? inner.document.body.appendChild(script) : inner.document.head.appendChild(script);
        inner.document.close();
      });
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => {
        const message = new inner.MessageEvent("message", { data: structuredClone(data) });
        inner.dispatchEvent(message);
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
