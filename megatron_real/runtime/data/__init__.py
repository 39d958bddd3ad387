"""The data set: files, records, chat templates, tokens."""
