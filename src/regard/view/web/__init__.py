"""The web views: one page, the app on this machine, and the widget of a notebook."""

from regard.view.web.app import App, serve
from regard.view.web.bundle import BUNDLE
from regard.view.web.html_page import page
from regard.view.web.notebook_widget import widget

__all__ = ["BUNDLE", "App", "page", "serve", "widget"]
