"""The head's side: the server that boxes call, the reports that it stores, and the files that it sends."""
