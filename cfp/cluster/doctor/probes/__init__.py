"""Small programs, each run by the doctor in a process of its own.

What may be missing, hang or end its process is touched here and nowhere else in the
doctor. A probe prints one line of JSON (`answer.answer`).
"""
