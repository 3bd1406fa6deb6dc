"""What a person sees of a run: the same picture on a web page, in a terminal, in a report and for Prometheus."""
