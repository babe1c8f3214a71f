"""The arguments that several commands take: options of a launch, a script, plans, a run, a folder
to work in."""
