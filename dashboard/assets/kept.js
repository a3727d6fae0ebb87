// Dash makes the table of runs anew when it has changed. What had the focus gets it back, by its id, and a table that was
// scrolled stays so, by its name.
(() => {
    let focused = null;
    const scrolled = new Map();
    const regions = () => document.querySelectorAll(".table[aria-label]");

    // Whoever points at something else has let go of it.
    document.addEventListener("pointerdown", () => { focused = null; }, true);
    document.addEventListener("focusin", (event) => { focused = event.target; });
    document.addEventListener("scroll", (event) => {
        const name = event.target.getAttribute?.("aria-label");
        if (name) scrolled.set(name, { region: event.target, page: location.pathname, top: event.target.scrollTop, left: event.target.scrollLeft });
    }, true);

    new MutationObserver(() => {
        if (focused?.id && !focused.isConnected && document.activeElement === document.body) {
            const again = document.getElementById(focused.id);
            again?.focus({ preventScroll: true });
        }
        for (const region of regions()) {
            const was = scrolled.get(region.getAttribute("aria-label"));
            if (!was || was.region === region || was.region.isConnected || was.page !== location.pathname) continue;
            was.region = region;
            region.scrollTo(was.left, was.top);
        }
    }).observe(document.documentElement, { childList: true, subtree: true });
})();
