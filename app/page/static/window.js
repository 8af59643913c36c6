// The window: other tabs, paper, and the beginning.

// Another tab may have loaded another model meanwhile.
window.addEventListener("focus", () => trigger("focus"));

// On paper the conversation is as long as it is. Gradio keeps rules for media to what is below its
// own frame, so this one comes by another way.
const onPaper = document.createElement("style");
onPaper.textContent = `@media print {
  html, body, gradio-app, .gradio-container, .main, .sidebar-parent, main.contain, .contain > .column,
  #transcript, #transcript .html-container, #transcript .html-container > div, .turns {
    display: block !important; height: auto !important; min-height: 0 !important;
    overflow: visible !important; padding-left: 0 !important;
  }
  #settings, #entry, #top button, .actions, .unkept, .refused { display: none !important; }
  #transcript .said { max-height: none !important; border: 1px solid var(--line); }
  #transcript .user { break-after: avoid; }
}`;
document.head.append(onPaper);

// What is light in the dark is pale on paper.
let isDark = false;
window.addEventListener("beforeprint", () => {
  isDark = document.body.classList.contains("dark");
  document.body.classList.remove("dark");
});
window.addEventListener("afterprint", () => document.body.classList.toggle("dark", isDark));

watch("value", show);
show();
