"""Programs over the public interface and the folders of runs: the command line and what its commands do."""
