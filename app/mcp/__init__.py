"""Tools of other programs for the page's chats, by the Model Context Protocol (MCP)."""
