"""Its being here puts `tests/` on the import path, so that tests can say `from support.toy_model import …`."""
