"""One SGLang engine: how it is configured, launched, controlled and given new weights."""
