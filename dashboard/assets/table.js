// Saves the table next to a button "CSV" or "JSON". Cells are text as shown; numbers lose their commas.
(() => {
    const NUMBER = /^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?$/;
    const value = (cell) => {
        const text = cell.innerText.trim();
        return cell.classList.contains("number") && NUMBER.test(text) ? Number(text.replaceAll(",", "")) : text;
    };
    // A spreadsheet would run text that begins like a formula.
    const quoted = (entry) => {
        const text = typeof entry === "string" && /^[=+\-@\t\r]/.test(entry) ? `'${entry}` : String(entry);
        return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const saved = {
        CSV: (head, rows) => [head, ...rows].map((row) => row.map(quoted).join(",") + "\r\n").join(""),
        JSON: (head, rows) => JSON.stringify(rows.map((row) => Object.fromEntries(row.map((entry, i) => [head[i] || "name", entry]))), null, 1),
    };

    document.addEventListener("click", (event) => {
        const kind = event.target.closest("button.save")?.textContent;
        const section = event.target.closest("section"), table = section?.querySelector("table");
        if (!kind || !table) return;
        const cells = (row) => [...row.cells].filter((cell) => !cell.classList.contains("ticks")).map(value);
        // A mark of the order is no part of a name.
        const [head, ...rows] = [...table.rows].filter((row) => !row.querySelector("td.none[colspan]")).map(cells);
        head.forEach((name, i) => { head[i] = String(name).replace(/ [▲▼]$/, ""); });
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([saved[kind](head, rows)], { type: kind === "CSV" ? "text/csv" : "application/json" }));
        link.download = `${[...document.querySelectorAll("h1"), section.querySelector("h2")].map((title) => title?.textContent ?? "").join(" ").trim().replaceAll(/[^\w.-]+/g, "-")}.${kind.toLowerCase()}`;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
})();
