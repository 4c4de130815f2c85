"""The page for thumbs: python -m rate.

__main__.py    the settings and the command
desk.py        the model that answers, what the page may ask, and the command that trains on the thumbs
ratings.py     the file of thumbs
server.py      HTTP
page.html      the page
"""
