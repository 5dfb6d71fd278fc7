"""A checkpoint of one layout written as if a job of another one had saved it, file by file. No process group."""
