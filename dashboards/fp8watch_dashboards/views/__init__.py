"""The console's pages, one function each, drawn by `app.py`.

Not called `pages`: Streamlit runs the files of a folder of that name beside the script by itself.
"""
