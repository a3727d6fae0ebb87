// Scrolls to the block that the address names after "#", once it is drawn: browsers look for it only when a page loads,
// and the page's content comes later.
(() => {
    let found = "";
    const seek = () => {
        const id = decodeURIComponent(location.hash.slice(1));
        const wanted = id && location.pathname + id;
        const block = wanted === found ? null : document.getElementById(id);
        block?.closest("details")?.setAttribute("open", "");
        if (block) block.scrollIntoView();
        if (block || !wanted) found = wanted;
    };
    // Dash's own event for a link of the page.
    window.addEventListener("_dashprivate_pushstate", () => { found = ""; seek(); });
    new MutationObserver(seek).observe(document.documentElement, { childList: true, subtree: true });
})();
