"""The page for thumbs: python -m rate.

__main__.py    the settings and the command
answering.py   who answers: a model in this process, or an OpenAI-compatible server
ratings.py     the file of thumbs
desk.py        what the page may ask, and the command that trains on the thumbs
server.py      HTTP
page.html      the page
"""
