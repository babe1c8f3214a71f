"""Makes every HTML page: document, table, chart, bars, timeline, heat map."""
