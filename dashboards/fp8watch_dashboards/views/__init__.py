"""The console's pages, one function each; `app.py` draws them.

The folder is not called `pages`, because Streamlit itself runs the files of a folder of that name beside the script.
"""
