// Search in pages that were opened as files: browsers start no worker there, so its script runs in a frame of the page.
// The name must keep "iframe-worker", or the offline plugin adds a script of another host for the same purpose.
"use strict";
if (location.protocol === "file:") {
    window.Worker = class extends EventTarget {
        constructor(url) {
            super();
            this.waiting = [];
            this.frame = document.createElement("iframe");
            this.frame.hidden = true;
            document.body.append(this.frame);
            const inside = this.frame.contentWindow;
            inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
            const script = inside.document.createElement("script");
            script.src = url;
            script.addEventListener("load", () => {
                const messages = this.waiting;
                this.waiting = null;
                messages.forEach((data) => this.postMessage(data));
            });
            inside.document.head.append(script);
        }

        postMessage(data) {
            if (this.waiting) this.waiting.push(data);
            else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
        }

        terminate() {
            this.frame.remove();
        }
    };
}
