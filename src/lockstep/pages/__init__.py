"""Makes HTML pages: documents, tables, charts, bars, timelines and heat maps."""
