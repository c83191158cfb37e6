"""Small programs, each run by the doctor in a process of its own.

No other module of the doctor imports a package. A probe prints one line of JSON
(`answer.answer`).
"""
