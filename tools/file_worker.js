// The site's search runs in a Worker, which browsers refuse to pages of a folder (file://): there a hidden frame runs it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.loaded = new Promise((resolve) => (frame.onload = resolve));
      const prelude = `postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = resolve;
          document.body.append(script);
        })), Promise.resolve());`;
      this.inside.document.open();
      this.inside.document.write(`<body><script>${prelude}<\/script><script src="${url}"><\/script></body>`);
      this.inside.document.close();
      addEventListener("message", (event) => {
        if (event.source !== this.inside) return;
        event.stopImmediatePropagation();
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
