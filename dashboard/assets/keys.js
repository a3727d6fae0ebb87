// Keyboard shortcuts; `?` lists them.
(() => {
    const step = (by) => {
        const links = [...document.querySelectorAll("#trajectories-found td:first-child a")];
        const opened = (address) => new URLSearchParams(address).get("open");
        const at = links.findIndex((link) => opened(new URL(link.href).search) === opened(location.search));
        links[at < 0 ? 0 : at + by]?.click();
    };
    const KEYS = {
        "?": ["this list", () => dialog.open ? dialog.close() : dialog.showModal()],
        "1 to 9": ["a view of the run", (key) => document.querySelectorAll("nav a")[key - 1]?.click()],
        r: ["all runs", () => document.querySelector(".brand")?.click()],
        "/": ["filter or search", () => document.querySelector("#runs-filter, #trajectories-text")?.focus()],
        j: ["next group of the list", () => step(1)],
        k: ["previous group", () => step(-1)],
        t: ["light, automatic or dark", () => {
            const choices = [...document.querySelectorAll("#scheme input")];
            choices[(choices.findIndex((choice) => choice.checked) + 1) % choices.length]?.click();
        }],
    };
    const dialog = document.createElement("dialog");
    dialog.id = "keys";
    dialog.setAttribute("aria-label", "Keyboard shortcuts");
    for (const [key, [words]] of Object.entries(KEYS)) {
        const line = document.createElement("p"), name = document.createElement("kbd");
        name.textContent = key;
        line.append(name, ` ${words}`);
        dialog.append(line);
    }
    document.addEventListener("DOMContentLoaded", () => document.body.append(dialog));
    document.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, [contenteditable]")) return;
        const entry = KEYS[/^[1-9]$/.test(event.key) ? "1 to 9" : event.key];
        if (!entry) return;
        event.preventDefault();
        entry[1](event.key);
    });
})();
