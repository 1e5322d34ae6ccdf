"""Outside engines and special kinds of model; each fills a protocol of the core."""
