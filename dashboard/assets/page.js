// What Dash leaves to the page: its title, the mark of the current view, and a banner while the server does not answer.
(() => {
    const PATIENCE_MS = 5000, AGAIN_MS = 2000;
    let current;

    // The header is drawn anew on every page and every second.
    const name = () => {
        // Dash marks its radio buttons as options of a list, which they are not.
        for (const label of document.querySelectorAll("label[role=option]")) {
            label.removeAttribute("role");
            label.removeAttribute("aria-selected");
            label.closest("[role=listbox]")?.setAttribute("role", "radiogroup");
        }
        const heading = document.querySelector("h1");
        if (!heading) return;
        const links = [...document.querySelectorAll("nav a, .controls a")];
        for (const link of links) {
            if (link.classList.contains("here")) link.setAttribute("aria-current", "page");
            else link.removeAttribute("aria-current");
        }
        const here = links.find((link) => link.classList.contains("here"));
        // On a narrow screen, the views scroll sideways.
        if (here && here.href !== current) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft;
        current = here?.href;
        const title = [here?.textContent, heading.textContent, "Millrace"].filter(Boolean).join(" · ");
        if (document.title !== title) document.title = title;
    };
    new MutationObserver(name).observe(document.body ?? document.documentElement, {
        childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: ["class"],
    });

    const ask = window.fetch.bind(window);
    const asked = new Map();
    let wrong = "";
    let returning = 0;

    const tell = () => {
        const seconds = (Date.now() - Math.min(Date.now(), ...asked.values())) / 1000;
        const slow = seconds * 1000 > PATIENCE_MS ? `The dashboard's server has not answered for ${seconds.toFixed(0)} s.` : "";
        const sentence = wrong || (slow && `${slow} What you see may be old.`);
        const banner = document.getElementById("connection");
        if (banner.textContent !== sentence) banner.textContent = sentence;
        banner.hidden = !sentence;
    };

    // Dash gives up once a request fails. So the page waits for the server, and is loaded again.
    const waitForServer = () => {
        returning ||= setInterval(() => ask(location.href, { method: "HEAD" }).then(() => location.reload(), () => {}), AGAIN_MS);
    };

    // Plotly takes a while to start, as the server does to read a run: so both begin at once. Dash waits for a Plotly
    // that is a promise; the script puts the real one in its place.
    const startPlotly = () => {
        const hasCharts = /^\/(run|compare)\b/.test(location.pathname) && !location.pathname.endsWith("/trajectories");
        if (window.Plotly || !window._dashPlotlyJSURL || !hasCharts) return;
        const loaded = new Promise((done, failed) => {
            const script = document.createElement("script");
            Object.assign(script, { src: window._dashPlotlyJSURL, async: true, onload: () => done(), onerror: failed });
            document.body.append(script);
        });
        loaded.catch(() => { window.Plotly = undefined; });
        window.Plotly = loaded;
    };

    window.fetch = async (...question) => {
        if (!String(question[0]?.url ?? question[0]).includes("_dash-update-component")) return ask(...question);
        setTimeout(startPlotly);
        const one = {};
        asked.set(one, Date.now());
        try {
            const answer = await ask(...question);
            await answer.clone().blob();  // Rejects if the connection is lost within the answer, which ends Dash's updates as well.
            wrong = answer.ok ? "" : `This page could not be updated: ${(await answer.clone().text()).trim() || answer.status}`;
            return answer;
        } catch (error) {
            wrong = "The dashboard's server does not answer: it was stopped, or the connection is lost. What you see is old.";
            waitForServer();
            throw error;
        } finally {
            asked.delete(one);
            tell();
        }
    };
    setInterval(tell, 1000);
})();
