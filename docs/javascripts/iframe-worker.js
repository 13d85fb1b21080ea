// Runs the search in a frame of the page in place of a worker, for two reasons:
// * browsers start no worker in a page that was opened as a file;
// * lunr takes unlike states for one when it minimizes its set of words ("1" and node 23, "12" and node 3), so that some
//   words of an index with many numbers, "scale" among them, end a search with an error. In a frame that can be corrected.
// The name must keep "iframe-worker", or the offline plugin adds a script of another host.
"use strict";
// A message of torch is pasted as it is, and words between double quotes would all have to be on the page.
function asWords(message) {
    return typeof message.data === "string" ? { ...message, data: message.data.replace(/"/g, " ") } : message;
}

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
            if (inside.lunr) {
                inside.lunr.TokenSet.prototype.toString = function () {
                    const edges = Object.keys(this.edges).sort();
                    return this._str || `${this.final} ${edges.map((label) => `${label}${this.edges[label].id}`).join(" ")}`;
                };
            }
            const messages = this.waiting;
            this.waiting = null;
            messages.forEach((data) => this.postMessage(data));
        });
        inside.document.head.append(script);
    }

    postMessage(data) {
        if (this.waiting) this.waiting.push(data);
        else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: asWords(data) }));
    }

    terminate() {
        this.frame.remove();
    }
};
